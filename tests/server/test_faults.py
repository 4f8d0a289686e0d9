"""500 bad requests of all kinds, while 16 good streams run: each is answered correctly, and no stream is affected.

The whole of `jaxserve serve`, an engine's process and an API worker, with a tiny model with random weights.
"""

import asyncio
import json
import random
import re
import subprocess
import sys
import time

import httpx
import psutil
import pytest
import tiny_tokenizer
from fault_acts import ACTS, WAITING_ACTS
from fault_tables import TABLES
from faults import BODY_LIMIT, KEY, RECEIVE_TIMEOUT, Wire
from test_server_engine import LLAMA
from waiting import PATIENCE, until

KINDS = [*TABLES, *ACTS]
NUM_FAULTS = 500
NUM_AT_ONCE = 12
NUM_STREAMS = 16
HEADERS = {"authorization": f"Bearer {KEY}"}
GROWTH_LIMIT = 32 * 2**20
"""Bytes by which all processes together may grow: allocators keep some free memory. One leaked body of each of the
large requests would be more.
"""


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    """The URL of the server, and its processes."""
    folder = tiny_tokenizer.byte_level(tmp_path_factory.mktemp("llama"))
    (folder / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 512}))
    flags = {
        "port": 0,
        "api-key": KEY,
        "served-model-name": "tiny",
        "load-format": "dummy",
        "block-size": 4,
        "kv-cache-memory": "1MiB",
        "max-num-seqs": 32,
        "max-num-batched-tokens": 16,
        "receive-timeout": RECEIVE_TIMEOUT,
        "max-body-size": BODY_LIMIT,
        "compilation-cache-dir": ".pytest_cache/xla",
        "warmup": "full",  # what is compiled while it serves has threads and a process that come and go
    }
    command = [sys.executable, "-m", "jaxserve", "serve", str(folder)]
    command += [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    log = tmp_path_factory.mktemp("log") / "stderr"
    with log.open("w") as stderr:  # a pipe that nobody reads would stop the server
        process = subprocess.Popen(command, stderr=stderr)
    try:
        while not (found := re.search(r"serving tiny at (http://\S+)/v1", log.read_text())):
            assert process.poll() is None, "it did not start:\n" + log.read_text()
            time.sleep(0.1)
        parent = psutil.Process(process.pid)
        yield found[1], [parent, *parent.children(recursive=True)]
        process.terminate()
        assert process.wait(timeout=PATIENCE) == 0
        assert "Traceback" not in log.read_text(), log.read_text()
    finally:
        process.kill()
        process.wait()


def address(url):
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


async def stream(client, url, number):
    """Run one good stream, and return its text."""
    body = {
        "prompt": f"{'Once upon a time ' * (number % 4)}{number}",
        "max_tokens": 20 + 3 * number,
        "temperature": 0.0 if number % 2 else 0.8,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
    }
    text = ""
    async with client.stream("POST", f"{url}/v1/completions", json=body, headers=HEADERS) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"]
    assert choice["finish_reason"] == "length"
    return text


async def misbehave(url, kind, seed):
    """Send one bad request of this kind, on a connection of its own."""
    chance = random.Random(seed)
    acts = ACTS | WAITING_ACTS
    wire = await Wire.open(address(url))
    try:
        await (acts[kind](wire, chance) if kind in acts else chance.choice(TABLES[kind]).act(wire))
    except Exception as error:
        error.add_note(f"in {kind!r}, {seed=}")
        raise
    finally:
        wire.close()


async def settle(client, url):
    """Wait until nothing is running, as the server's gauges say."""

    async def is_idle():
        text = (await client.get(f"{url}/metrics", headers=HEADERS)).text
        found = dict(re.findall(r"^jaxserve:(\w+)\{.*\} (\S+)$", text, re.M))
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(float(found[name]) for name in gauges)

    await until(is_idle)


def footprint(processes):
    """Bytes of memory and open files of all processes."""
    return sum(p.memory_info().rss for p in processes), sum(p.num_fds() for p in processes)


async def faults_beside_streams(url, processes):
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=PATIENCE, verify=False, limits=limits) as client:
        expected = [await stream(client, url, number) for number in range(NUM_STREAMS)]
        await asyncio.gather(*(misbehave(url, kind, 0) for kind in WAITING_ACTS))
        for kind in KINDS:  # caches and buffers that are made once and kept are not leaks
            await misbehave(url, kind, 0)
        await asyncio.gather(*(stream(client, url, number) for number in range(NUM_STREAMS)))
        await settle(client, url)
        before = footprint(processes)

        faults = iter([(KINDS[i % len(KINDS)], i) for i in range(NUM_FAULTS)])
        is_over = asyncio.Event()
        num_streams = 0

        async def misbehave_on():
            for kind, seed in faults:
                await misbehave(url, kind, seed)

        async def stream_on(number):
            nonlocal num_streams
            while not is_over.is_set():
                assert await stream(client, url, number) == expected[number], "a good stream was disturbed"
                num_streams += 1

        async with asyncio.TaskGroup() as good:
            for number in range(NUM_STREAMS):
                good.create_task(stream_on(number))
            async with asyncio.TaskGroup() as bad:
                for _ in range(NUM_AT_ONCE):
                    bad.create_task(misbehave_on())
                for kind in WAITING_ACTS:
                    for seed in range(NUM_FAULTS // len(KINDS)):
                        bad.create_task(misbehave(url, kind, seed))
            is_over.set()
        await settle(client, url)
        await until(lambda: footprint(processes)[1] <= before[1])  # the last connections are being closed
        return before, footprint(processes), num_streams


@pytest.mark.slow
async def test_nobody_else_notices(serving):
    url, processes = serving
    assert len(KINDS) + len(WAITING_ACTS) >= 40
    before, after, num_streams = await faults_beside_streams(url, processes)
    assert num_streams >= NUM_STREAMS
    assert all(process.is_running() for process in processes)
    assert after[0] - before[0] < GROWTH_LIMIT
