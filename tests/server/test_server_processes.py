"""The processes of `jaxserve serve`: what remains, and what clients see, when one of them ends."""

import asyncio
import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

import fake_serve
import httpx
import psutil
import pytest
import tiny_tokenizer
from depths import quick_first, quick_only
from serving import assert_error
from waiting import PATIENCE, until, wait_until

from jaxserve.config import ServerConfig
from jaxserve.server.process import supervisor

ROOT = pathlib.Path(__file__).parents[2]


class Serving:
    """A running server of several processes, its sockets in a folder of its own."""

    def __init__(self, model, *flags, folder=None):
        self.temporary = tempfile.TemporaryDirectory(prefix="js", dir=folder)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fake_serve", str(model), "--port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support"), "TMPDIR": self.temporary.name},
            cwd=ROOT,
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

    def wait_for_children(self, number):
        def are_there():
            parent = psutil.Process(self.process.pid)
            self.children = parent.children(recursive=True)
            return len(parent.children()) == number  # workers have children of their own

        wait_until(are_there)

    def child(self, module):
        (found,) = [child for child in self.children if any(part.endswith(module) for part in child.cmdline())]
        return found

    @property
    def workers(self):
        return [child for child in self.children if "jaxserve.server.process.worker" in child.cmdline()]

    @property
    def engine(self):
        return self.child("fake_serve")

    @property
    def folder(self):
        (folder,) = pathlib.Path(self.temporary.name).iterdir()
        return folder

    def port(self):
        sockets = psutil.Process(self.process.pid).net_connections()
        (port,) = {each.laddr.port for each in sockets if each.status == "LISTEN"}
        return port

    def wait(self):
        """Return the exit code, once nothing of the server remains."""
        code = self.process.wait(timeout=PATIENCE)
        _, alive = psutil.wait_procs(getattr(self, "children", []), timeout=PATIENCE)
        assert not alive
        wait_until(lambda: not os.listdir(self.temporary.name))  # the last one to leave removes it
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

    def start(*flags, **options):
        started.append(Serving(model, *flags, **options))
        return started[-1]

    yield start
    for serving in started:
        serving.close()


async def stream(client, url, *, prompt="a", max_tokens, on_first=None, stream=True):
    """Send one request; return its status, its text, and the error it ended with, if any."""
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
    return httpx.AsyncClient(timeout=PATIENCE, verify=False, limits=httpx.Limits(max_connections=200))


async def load(http, url, number, **options):
    """Send `number` requests at once, and return their tasks when all have begun."""
    begun = [asyncio.Event() for _ in range(number)]
    tasks = [asyncio.create_task(stream(http, url, on_first=event, **options)) for event in begun]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), PATIENCE)
    return tasks


async def metric(http, url, name):
    text = (await http.get(f"{url}/metrics")).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"jaxserve:{name}"))


def test_workers_share_an_engine_and_are_replaced_and_drain(start):
    """SIGTERM under load, and kill -9 of an API worker before."""
    server = start("--api-workers", "2", "--shutdown-timeout", str(PATIENCE)).wait_until_serving()
    workers = server.workers
    assert len(workers) == 2

    unwatched = []

    async def run():
        async with client() as http:
            doomed = []
            while not all(map(num_connections, workers)):  # the kernel distributes connections as it likes
                doomed += await load(http, server.url, 12, max_tokens=2000)
            unwatched[:] = await asyncio.gather(*(begin(http) for _ in range(8)))
            number = len(doomed) + 8
            await until(lambda: are_running(http, number))
            workers[0].kill()
            await until(lambda: are_running(http, number, False))
            tokens = await metric(http, server.url, "generation_tokens_total")
            assert tokens >= len(doomed)  # those of the dead one still count

            await until(replaced)
            await asyncio.to_thread(server.read_log_until, "is there again")
            # The engine has dropped the requests of the dead worker, and nothing else; its successor reports so.
            await until(lambda: are_told(http, number - sum(task.done() for task in doomed)))
            ended = [task for task in doomed if task.done()]
            assert 0 < len(ended) < len(doomed)
            assert all(isinstance(task.exception(), httpx.RemoteProtocolError | httpx.ReadError) for task in ended)
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

    def num_connections(worker):
        return sum(each.status == psutil.CONN_ESTABLISHED for each in worker.net_connections("tcp"))

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
        ready = [
            child for child in psutil.Process(server.process.pid).children() if child.status() != psutil.STATUS_ZOMBIE
        ]
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


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"


@pytest.mark.slow
def test_the_first_lines_say_once_how_answers_are_read(start):
    chat = ("--tool-call-parser", "hermes", "--chat-template", "{{ messages[0].content }}")
    server = start("--api-workers", "2", *chat).wait_until_serving()
    server.process.terminate()
    assert server.wait() == 0
    log = server.rest_of_log()
    assert log.count("tool calls: hermes, by the option") == 1
    assert log.count("thoughts: none, no syntax found") == 1


@pytest.mark.parametrize("how", quick_first(["kill", "exception"]))
def test_the_end_of_the_engine(start, how):
    server = start().wait_until_serving()
    assert server.folder.stat().st_mode & 0o777 == 0o700
    (worker,) = server.workers
    loaded = {pathlib.Path(each.path).name for each in worker.memory_maps()}
    assert any("zmq" in name for name in loaded)
    assert not any("jaxlib" in name or "libjax" in name for name in loaded)

    async def run():
        async with client() as http:
            assert (await http.get(f"{server.url}/health")).status_code == 200
            streams = await load(http, server.url, 4, max_tokens=2000)
            whole = asyncio.create_task(stream(http, server.url, max_tokens=2000, stream=False))
            await until(lambda: running(http, 5))
            _, inside = await asyncio.open_connection(*re.search(r"//(.*):(\d+)", server.url).groups())
            inside.write(HEAD)  # as long as it waits for its body, /health is there to be asked
            await until(lambda: running(http, 5))
            if how == "kill":
                server.engine.kill()
            else:
                streams.append(asyncio.create_task(stream(http, server.url, prompt="D", max_tokens=2000)))
            await until(lambda: unhealthy(http))
            inside.close()
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

    # The engine may be gone before the API worker is, which then has the time to report it.
    for result in asyncio.run(run()):
        assert isinstance(result, httpx.TransportError) or result[2]["type"] == "service_unavailable_error"
    assert server.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_nothing_waits_for_a_long_step_nor_after_a_second_signal(start):
    server = start("--shutdown-timeout", str(10 * PATIENCE)).wait_until_serving()

    async def run():
        async with client() as http:
            await during_a_long_step(http)
            streams = await load(http, server.url, 2, max_tokens=2000)
            server.process.send_signal(signal.SIGINT)
            await until(lambda: is_draining(http))
            assert not any(task.done() for task in streams)
            server.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*streams)

    async def during_a_long_step(http):
        folder = server.folder
        long = asyncio.create_task(stream(http, server.url, prompt="L", max_tokens=1))
        await until((folder / fake_serve.IN_STEP).exists)
        for path in ("health", "metrics"):
            assert (await http.get(f"{server.url}/{path}")).status_code == 200
        assert not long.done()
        (folder / fake_serve.STEP_OVER).touch()
        assert await long == (200, "L", None)

    async def is_draining(http):
        return (await http.get(f"{server.url}/health")).status_code == 503

    assert all(error["type"] == "service_unavailable_error" for _, _, error in asyncio.run(run()))
    assert server.wait() == 0


@pytest.mark.slow
def test_a_signal_after_the_end_changes_no_exit_code(start):
    server = start("--late-signal").wait_until_serving()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


@pytest.mark.parametrize("num_workers", quick_only(["1", "2"], "2"))
def test_the_port_is_taken_before_the_engine_starts(start, num_workers):
    """Servers of several workers, which listen on one port together, take it early, too."""
    server = start("--start-error", "hang", "--api-workers", num_workers)
    server.wait_for_children(1 + int(num_workers))
    port = server.port()
    second = start("--port", str(port), "--api-workers", num_workers)
    assert second.wait() == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in second.rest_of_log()


@pytest.mark.slow
def test_a_signal_while_a_worker_is_being_replaced(start):
    server = start("--shutdown-timeout", str(10 * PATIENCE)).wait_until_serving()
    (worker,) = server.workers
    worker.kill()
    wait_until(lambda: not worker.is_running())
    server.wait_for_children(2)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


def test_workers_that_keep_dying_are_not_replaced_for_ever():
    parent = supervisor.Supervisor(ServerConfig(), start_engine=lambda _: None, model_path="", tokenizer="", seed=0)
    assert [parent._may_restart(float(now)) for now in range(supervisor.MAX_RESTARTS + 1)] == [True] * 5 + [False]
    assert parent._may_restart(supervisor.RESTART_PERIOD + supervisor.MAX_RESTARTS)


@pytest.mark.parametrize(
    ("error", "message"),
    quick_first(
        [("the weights do not fit", "the weights do not fit"), ("crash", "the engine has ended with code 1 .*")]
    ),
)
def test_a_start_that_fails_is_one_line(start, error, message):
    server = start("--start-error", error)
    assert server.wait() == 1
    *_, last = server.rest_of_log().splitlines()
    assert re.fullmatch(f"jaxserve: error: {message}", last)


@pytest.mark.parametrize("num_workers", quick_first(["1", "2"]))
def test_what_is_answered_while_it_starts_and_a_signal_as_soon_as_it_is_well(start, num_workers):
    server = start("--start-error", "hang", "--api-workers", num_workers, "--api-key", "secret")
    server.wait_for_children(1 + int(num_workers))
    url = f"http://127.0.0.1:{server.port()}"

    def get(path):
        return httpx.get(f"{url}/{path}", timeout=PATIENCE, verify=False)

    for _ in range(2 * int(num_workers)):
        assert get("live").status_code == 200
        health = get("health")
        assert (health.status_code, health.json()) == (503, {"status": "the server is starting"})
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=PATIENCE, verify=False)
        assert_error(refused, 503, None, "service_unavailable_error")
        assert refused.headers["retry-after"] == "5"
    (server.folder / fake_serve.START).touch()
    wait_until(lambda: get("health").status_code == 200)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    log = server.rest_of_log()
    assert log.count("shutting down\n") == int(num_workers)
    assert "Traceback" not in log


@pytest.mark.slow
def test_a_signal_while_it_starts(start):
    server = start("--start-error", "hang")
    server.wait_for_children(2)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM
    assert "Traceback" not in server.rest_of_log()


@pytest.mark.slow
def test_a_log_that_nobody_reads_stops_nothing(start):
    server = start("--api-workers", "2", "--log-level", "debug").wait_until_serving()
    fcntl.fcntl(server.process.stderr, fcntl.F_SETPIPE_SZ, 4096)

    async def run():
        async with client() as http:
            for _ in range(100):
                assert (await http.get(f"{server.url}/live")).status_code == 200
                assert (await http.get(f"{server.url}/version")).status_code == 200
            return await stream(http, server.url, max_tokens=3)

    assert asyncio.run(run()) == (200, "aaa", None)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


@pytest.fixture
def disk():
    """A folder with its own file system of one megabyte, and a function that fills it."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="js"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        folder.rmdir()
        pytest.skip("a file system cannot be mounted here")

    def fill():
        with contextlib.suppress(OSError), (folder / "filler").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    yield folder, fill
    subprocess.run(["umount", "-l", str(folder)], check=True)
    folder.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize("is_full_at_start", [True, False])
def test_a_full_disk_costs_only_what_needs_it(disk, start, is_full_at_start):
    folder, fill = disk
    server = start("--api-workers", "2", folder=folder)
    wait_until(lambda: os.listdir(server.temporary.name))
    if is_full_at_start:
        fill()
    server.wait_until_serving()
    if not is_full_at_start:
        fill()

    async def run():
        async with client() as http:
            answers = [await http.post(f"{server.url}/v1/responses", json=body) for _ in range(8)]
            texts = [await stream(http, server.url, max_tokens=3) for _ in range(4)]
            statuses = {(await http.get(f"{server.url}/{path}")).status_code for path in ("health", "metrics", "live")}
            in_background = await http.post(f"{server.url}/v1/responses", json=body | {"background": True})
            return answers, texts, statuses, in_background

    body = {"input": "a", "max_output_tokens": 3}
    answers, texts, statuses, in_background = asyncio.run(run())
    assert [answer.status_code for answer in answers] == [200] * 8
    assert [answer.json()["store"] for answer in answers] == [is_full_at_start] * 8  # then they are kept in memory
    assert texts == [(200, "aaa", None)] * 4
    assert statuses == {200}
    assert in_background.status_code == (200 if is_full_at_start else 503)
    (folder / "filler").unlink()
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=PATIENCE, verify=False)
    assert answer.json()["store"] is True
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    log = server.rest_of_log()
    assert "database or disk is full" in log or "No space left on device" in log
    assert "Traceback" not in log


@pytest.mark.slow
def test_too_few_file_descriptors_are_reported(start):
    server = start().wait_until_serving()
    (worker,) = server.workers
    limit = worker.num_fds() + 8
    worker.rlimit(psutil.RLIMIT_NOFILE, (limit, limit))
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port()), PATIENCE))
        server.read_log_until("connections are turned away: Too many open files")

    async def answered():
        async with client() as http:
            with contextlib.suppress(httpx.TransportError):
                return await stream(http, server.url, max_tokens=3) == (200, "aaa", None)
        return False

    asyncio.run(until(answered))
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert "turned away" not in server.rest_of_log().partition("turned away")[2]
