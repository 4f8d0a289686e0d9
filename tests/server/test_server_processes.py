"""The processes of `jaxserve serve`, as they are: what is left, and what clients see, when one of them ends."""

import asyncio
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import httpx
import psutil
import pytest
import tiny_tokenizer
from server.serving import assert_error

from jaxserve.config import ServerConfig
from jaxserve.server import supervisor

TESTS = pathlib.Path(__file__).parents[1]


class Serving:
    """A running server of several processes, its sockets in a folder of its own."""

    def __init__(self, model, *flags):
        self.temporary = tempfile.TemporaryDirectory(prefix="js")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server.fake_serve", str(model), "--port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(TESTS), "TMPDIR": self.temporary.name},
            cwd=TESTS.parent,
        )
        self.log = []

    def read_log_until(self, pattern):
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(pattern, line):
                return found
        pytest.fail(f"{pattern} is not in the log:\n" + "".join(self.log))

    def wait_until_serving(self):
        self.url = self.read_log_until(r"serving .* at (http://\S+)/v1")[1]
        self.children = psutil.Process(self.process.pid).children(recursive=True)
        return self

    def child(self, module):
        (found,) = [child for child in self.children if any(part.endswith(module) for part in child.cmdline())]
        return found

    @property
    def engine(self):
        return self.child("server.fake_serve")

    @property
    def folder(self):
        (folder,) = pathlib.Path(self.temporary.name).iterdir()
        return folder

    def wait(self):
        """The exit code, once nothing of the server is left."""
        code = self.process.wait(timeout=30)
        _, alive = psutil.wait_procs(getattr(self, "children", []), timeout=20)
        assert not alive
        deadline = time.monotonic() + 5
        while os.listdir(self.temporary.name) and time.monotonic() < deadline:  # the last one to leave removes it
            time.sleep(0.02)
        assert os.listdir(self.temporary.name) == []
        return code

    def rest_of_log(self):
        return "".join(self.log) + self.process.stderr.read()

    def close(self):
        for child in getattr(self, "children", []):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.kill()
        self.process.communicate()
        self.temporary.cleanup()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_tokenizer.byte_level(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(model):
    started = []

    def start(*flags):
        started.append(Serving(model, *flags))
        return started[-1]

    yield start
    for serving in started:
        serving.close()


async def stream(client, url, *, prompt="a", max_tokens, on_first=None, stream=True):
    """One request: its status, its text, and the error it ended with, if any."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": stream}
    text, error = "", None
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if not stream or response.status_code != 200:
            await response.aread()
            return response.status_code, "", response
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                error = event.get("error", error)
                text += event["choices"][0]["text"] if "choices" in event else ""
                if on_first is not None:
                    on_first.set()
    return response.status_code, text, error


def client():
    return httpx.AsyncClient(timeout=30, verify=False, limits=httpx.Limits(max_connections=200))


async def load(http, url, number, **options):
    """So many requests at once, all of which have begun; their tasks."""
    begun = [asyncio.Event() for _ in range(number)]
    tasks = [asyncio.create_task(stream(http, url, on_first=event, **options)) for event in begun]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), 20)
    return tasks


async def metric(http, url, name):
    text = (await http.get(f"{url}/metrics")).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"jaxserve:{name}"))


async def until(condition):
    async with asyncio.timeout(40):  # a process may take long to start where others are at work
        while not await condition():
            await asyncio.sleep(0.05)


def test_workers_share_an_engine_and_are_replaced_and_drain(start):
    """SIGTERM under load, and kill -9 of an API worker before."""
    server = start("--api-workers", "2", "--shutdown-timeout", "20").wait_until_serving()
    workers = [child for child in server.children if child.pid != server.engine.pid]
    assert len(workers) == 2

    unwatched = []

    async def run():
        async with client() as http:
            doomed = await load(http, server.url, 12, max_tokens=2000)
            unwatched[:] = await asyncio.gather(*(begin(http) for _ in range(8)))
            await until(lambda: are_running(http, 20))
            assert all(len(worker.net_connections("tcp")) > 1 for worker in workers)  # both have some of them
            workers[0].kill()
            await until(lambda: are_running(http, 20, False))
            await asyncio.sleep(0.3)
            ended = [task for task in doomed if task.done()]
            assert 0 < len(ended) < 12
            assert all(isinstance(task.exception(), httpx.RemoteProtocolError | httpx.ReadError) for task in ended)
            tokens = await metric(http, server.url, "generation_tokens_total")
            assert tokens >= 12  # those of the dead one still count

            await until(replaced)
            await asyncio.to_thread(server.read_log_until, "is there again")
            # The engine has dropped what the dead one asked for, and nothing else; its successor says so.
            await until(lambda: are_told(http, 20 - len(ended)))
            for path in unwatched:
                assert (await http.delete(path)).status_code == 200
            assert await metric(http, server.url, "generation_tokens_total") >= tokens
            answers = await asyncio.gather(*(stream(http, server.url, max_tokens=3) for _ in range(8)))
            assert answers == [(200, "aaa", None)] * 8

            for task in doomed:
                task.cancel()
            finishing = await load(http, server.url, 8, max_tokens=100)
            server.process.send_signal(signal.SIGTERM)
            await until(refused)
            return await asyncio.gather(*finishing)

    async def begin(http):
        body = {"input": "a", "background": True, "max_output_tokens": 1900}
        answer = await http.post(f"{server.url}/v1/responses", json=body)
        return f"{server.url}/v1/responses/{answer.json()['id']}"

    async def are_told(http, number):
        statuses = [(await http.get(path)).json()["status"] for path in unwatched]
        assert set(statuses) <= {"in_progress", "failed"}
        return await are_running(http, number - statuses.count("failed"))

    async def are_running(http, number, is_so=True):
        with contextlib.suppress(httpx.TransportError):  # the worker that is asked may be the one that is killed
            return (await metric(http, server.url, "num_requests_running") == number) == is_so

    async def replaced():
        server.children = psutil.Process(server.process.pid).children(recursive=True)
        ready = [child for child in server.children if child.status() != psutil.STATUS_ZOMBIE]
        return len(ready) == 3 and all(child.net_connections("tcp") for child in ready if child != server.engine)

    async def refused():
        async with client() as http:
            try:
                return (await http.get(f"{server.url}/health")).status_code == 503
            except httpx.TransportError:
                return True  # by then it may take no connection any more

    assert asyncio.run(run()) == [(200, "a" * 100, None)] * 8
    assert server.wait() == 0
    log = server.rest_of_log()
    (number,) = re.findall(r"API worker (\d) has ended with code -9\n", log)
    assert f"API worker {number} is there again\n" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("how", ["kill", "exception"])
def test_the_end_of_the_engine(start, how):
    server = start().wait_until_serving()
    assert server.folder.stat().st_mode & 0o777 == 0o700
    (worker,) = [child for child in server.children if child != server.engine]
    loaded = {pathlib.Path(each.path).name for each in worker.memory_maps()}
    assert any("zmq" in name for name in loaded)
    assert not any("jaxlib" in name or "libjax" in name for name in loaded)

    async def run():
        async with client() as http:
            assert (await http.get(f"{server.url}/health")).status_code == 200
            streams = await load(http, server.url, 4, max_tokens=2000)
            whole = asyncio.create_task(stream(http, server.url, max_tokens=2000, stream=False))
            await until(lambda: running(http, 5))
            if how == "kill":
                server.engine.kill()
            else:
                streams.append(asyncio.create_task(stream(http, server.url, prompt="D", max_tokens=2000)))
            await until(lambda: unhealthy(http))
            return await asyncio.gather(*streams), await whole

    async def running(http, number):
        return await metric(http, server.url, "num_requests_running") == number

    async def unhealthy(http):
        with contextlib.suppress(httpx.TransportError):
            return (await http.get(f"{server.url}/health")).status_code == 503
        pytest.fail("the server was gone before it said that it is not healthy")

    streams, (status, _, whole) = asyncio.run(run())
    assert all(status == 200 and error["type"] == "service_unavailable_error" for status, _, error in streams[:4])
    assert status == 503
    assert_error(whole, 503, None, "service_unavailable_error")
    assert server.wait() == 1
    assert "the engine's process has ended with code" in server.rest_of_log()


def test_the_end_of_the_parent(start):
    server = start("--api-workers", "2").wait_until_serving()

    async def run():
        async with client() as http:
            streams = await load(http, server.url, 2, max_tokens=2000)
            server.process.kill()
            return await asyncio.gather(*streams, return_exceptions=True)

    assert all(isinstance(result, httpx.TransportError) for result in asyncio.run(run()))
    assert server.wait() == -signal.SIGKILL


def test_nothing_waits_for_a_long_step_nor_after_a_second_signal(start):
    server = start("--shutdown-timeout", "60").wait_until_serving()

    async def run():
        async with client() as http:
            await during_a_long_step(http)
            streams = await load(http, server.url, 2, max_tokens=2000)
            server.process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.3)
            assert not any(task.done() for task in streams)
            server.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*streams)

    async def during_a_long_step(http):
        long = asyncio.create_task(stream(http, server.url, prompt="L", max_tokens=1))
        await asyncio.sleep(0.3)  # by now it is in its step
        for path in ("health", "metrics"):
            assert (await http.get(f"{server.url}/{path}")).status_code == 200
        assert not long.done(), "they have waited for it"
        assert await long == (200, "L", None)

    assert all(error["type"] == "service_unavailable_error" for _, _, error in asyncio.run(run()))
    assert server.wait() == 0


def test_a_signal_while_a_worker_is_being_replaced(start):
    server = start("--shutdown-timeout", "60").wait_until_serving()
    (worker,) = [child for child in server.children if child != server.engine]
    worker.kill()
    deadline = time.monotonic() + 40
    while len(psutil.Process(server.process.pid).children()) < 2 or worker.is_running():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    assert server.wait() == 0
    assert time.monotonic() - begun < 30


def test_workers_that_keep_dying_are_not_replaced_for_ever():
    parent = supervisor.Supervisor(ServerConfig(), start_engine=lambda _: None, model_path="", tokenizer="", seed=0)
    assert [parent._may_restart(float(now)) for now in range(supervisor.MAX_RESTARTS + 1)] == [True] * 5 + [False]
    assert parent._may_restart(supervisor.RESTART_PERIOD + supervisor.MAX_RESTARTS)


@pytest.mark.parametrize(
    ("error", "message"),
    [("the weights do not fit", "the weights do not fit"), ("crash", "the engine has ended with code 1 .*")],
)
def test_a_start_that_fails_is_one_line(start, error, message):
    server = start("--start-error", error)
    assert server.wait() == 1
    *_, last = server.rest_of_log().splitlines()
    assert re.fullmatch(f"jaxserve: error: {message}", last)


def test_a_signal_while_it_starts(start):
    server = start()
    deadline = time.monotonic() + 20
    while not os.listdir(server.temporary.name) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    server.children = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM
    assert "Traceback" not in server.rest_of_log()
