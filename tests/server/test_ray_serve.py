"""The Ray Serve application over a Ray of this machine, where Ray is installed (the extra "ray")."""

import asyncio
import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys

import httpx
import pytest
from waiting import PATIENCE

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra 'ray' is not installed")

SCRIBE = "scribe-2m"
OPTIONS = {
    "model": SCRIBE,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_memory": 2**22,
    "warmup": "none",
    "min_replicas": 2,
    "max_replicas": 2,
    "num_cpus": 0.1,
    "max_body_size": 2**16,
}


BODY = {"model": SCRIBE, "prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


def record_of(log):
    return log.with_name("record")


def replicas_of_requests(log):
    """Return pairs of a request's id and a replica that it came to."""
    return {tuple(line.split()) for line in record_of(log).read_text().splitlines()}


def start(port, log, **changes):
    command = [sys.executable, "-m", "ray_cluster", str(port), json.dumps(OPTIONS | changes), str(record_of(log))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with log.open("w") as errors:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )


@contextlib.contextmanager
def running(log, **changes):
    """A cluster, by its process and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with start(port, log, **changes) as cluster:
        assert cluster.stdout.readline() == "ready\n", log.read_text()
        yield cluster, f"http://127.0.0.1:{port}"
        cluster.communicate(timeout=PATIENCE)
        assert cluster.returncode == 0, log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modle": "a"}, "unknown options: modle"),
        ({"min_replicas": 3}, "min_replicas and max_replicas must be in [1, 64], in this order, got 3 and 2"),
    ],
)
def test_wrong_options_are_named(tmp_path, options, message):
    log = tmp_path / "log"
    with start(0, log, **options) as cluster:
        cluster.communicate(timeout=PATIENCE)
    assert log.read_text().splitlines()[-1] == f"jaxserve.errors.ConfigError: {message}"


@pytest.mark.slow
async def test_routes_streams_and_the_death_of_a_replica(tmp_path):
    log = tmp_path / "log"

    async def ask(name="one", **more):
        return await http.post(f"{url}/v1/completions", json=BODY | more, headers={"X-Request-Id": name})

    async def ask_until(event, prompt):
        answers = {}
        while not event.is_set():
            name = f"{prompt}-{len(answers)}"
            answers[name] = await ask(name, prompt=prompt)
        return answers

    with running(log) as (cluster, url):
        async with httpx.AsyncClient(timeout=PATIENCE) as http:
            first = (await ask()).json()
            text = first["choices"][0]["text"]
            assert (await http.get(f"{url}/v1/models")).json()["data"][0]["id"] == SCRIBE
            refused = await ask(max_tokens=-1)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "max_tokens"
            too_large = await ask(prompt="a" * 2**17)
            assert (too_large.status_code, len(too_large.history)) == (413, 0)
            streamed = await ask(stream=True)
            assert streamed.headers["content-type"].startswith("text/event-stream")
            assert streamed.text.count("data: ") > 30
            killed = asyncio.Event()
            asking = [asyncio.create_task(ask_until(killed, f"{number}-is-a-number")) for number in range(24)]
            while len(replicas_of_requests(log)) < 50:
                await asyncio.sleep(0.05)
            cluster.stdin.write("kill\n")
            cluster.stdin.flush()
            answered, replica = (await asyncio.to_thread(cluster.stdout.readline)).split()
            assert answered == "killed"
            killed.set()
            answers = {name: answer for some in await asyncio.gather(*asking) for name, answer in some.items()}
            failed = {name: answer for name, answer in answers.items() if answer.status_code != 200}
            assert all(answer.status_code == 500 and "has died" in answer.text for answer in failed.values())
            ran_there = {name for name in answers if (name, replica) in replicas_of_requests(log)}
            assert set() < failed.keys() <= ran_there < answers.keys(), "only what ran on the killed replica is lost"
            again = [await ask() for _ in range(4)]
            assert [answer.json()["choices"][0]["text"] for answer in again] == [text] * 4


@pytest.mark.slow
async def test_a_replica_is_added_while_requests_queue(tmp_path):
    log = tmp_path / "log"
    options = {"min_replicas": 1, "target_ongoing_requests": 1}

    async def ask(name):
        while len({replica for _, replica in replicas_of_requests(log)}) < 2:
            answer = await http.post(f"{url}/v1/completions", json=BODY, headers={"X-Request-Id": name})
            assert answer.status_code == 200, answer.text

    with running(log, **options) as (_, url):
        record_of(log).touch()
        async with httpx.AsyncClient(timeout=PATIENCE) as http, asyncio.timeout(PATIENCE):
            await asyncio.gather(*(ask(f"of-{number}") for number in range(4)))
