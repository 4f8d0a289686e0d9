"""Draining, the end of the process, and the death of the engine."""

import asyncio
import json
import pathlib
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest
from engine.fake_client import Script
from server.serving import RunningFake, assert_error, frames
from waiting import wait_until

from jaxserve.config import ServerConfig
from jaxserve.errors import QueueFull, StartupError
from jaxserve.server import bind

ROOT = pathlib.Path(__file__).parents[2]


class Stream(threading.Thread):
    """A streaming request in a thread; `begun` is set at its first byte, `response` when it has ended."""

    def __init__(self, server, **body):
        super().__init__(daemon=True)
        self.server = server
        self.body = {"prompt": "abc", "stream": True, "max_tokens": 400, **body}
        self.begun = threading.Event()
        self.response = None
        self.start()

    def run(self):
        url = f"{self.server.url}/v1/completions"
        with httpx.stream("POST", url, json=self.body, timeout=20, verify=False) as response:
            content = b""
            for data in response.iter_bytes():
                content += data
                self.begun.set()
        self.response = httpx.Response(response.status_code, headers=response.headers, content=content)

    def result(self):
        self.join(timeout=20)
        return self.response


@pytest.fixture
def started(tokenizer):
    """Starts servers that the test ends itself."""
    servers = []

    def start(client_options=None, **config):
        server = RunningFake(tokenizer, ServerConfig(port=0, **config), **(client_options or {}))
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.client.close()
        server.wait()


def test_drain_finishes_what_runs_and_takes_nothing_new(started):
    server = started({"step_seconds": 0.02})
    stream = Stream(server, max_tokens=60)
    wait_until(lambda: server.client.num_running == 1)
    with httpx.Client(base_url=server.url, verify=False) as open_connection:
        assert open_connection.get("/health").status_code == 200
        server.server.stop()
        wait_until(lambda: server.server.state.is_draining)
        answer = open_connection.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "the server is shutting down"})
        assert open_connection.get("/live").status_code == 200
        assert open_connection.get("/metrics").status_code == 200
        refused = open_connection.post("/v1/completions", json={"prompt": "a"})
    assert_error(refused, 503, None, "service_unavailable_error")
    chunks = frames(stream.result())
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc" * 20
    assert server.wait() == 0
    with pytest.raises(httpx.ConnectError):
        server.get("/live")


def test_drain_gives_up_after_the_timeout(started):
    server = started(shutdown_timeout=0.3)
    server.play = lambda request: Script(token_ids=[70], hangs=True)
    stream, whole = Stream(server), Stream(server, stream=False)
    wait_until(lambda: server.client.num_running == 2)
    assert stream.begun.wait(timeout=20)
    server.server.stop()
    assert server.wait() == 0
    assert_error(whole.result(), 503, None, "service_unavailable_error")
    assert frames(stream.result())[-1]["error"]["type"] == "service_unavailable_error"
    assert server.client.num_running == 0


def test_a_second_stop_ends_the_wait(started):
    server = started(shutdown_timeout=60)
    server.play = lambda request: Script(token_ids=[], hangs=True)
    stream = Stream(server)
    wait_until(lambda: server.client.num_running == 1)
    server.server.stop()
    wait_until(lambda: server.server.state.is_draining)
    server.server.stop()
    assert server.wait() == 0
    assert_error(stream.result(), 503, None, "service_unavailable_error")


@pytest.mark.parametrize("silently", [False, True])
def test_death_of_the_engine(started, silently):
    server = started()
    server.play = lambda request: Script(token_ids=[70], hangs=True)
    stream, whole = Stream(server), Stream(server, stream=False)
    wait_until(lambda: server.client.num_running == 2)
    assert stream.begun.wait(timeout=20)
    server.client.die("the device is gone", silently=silently)
    assert_error(whole.result(), 503, None, "service_unavailable_error")
    assert frames(stream.result())[-1]["error"]["type"] == "service_unavailable_error"
    assert "device" not in whole.response.text
    assert server.wait() == 1


def test_health_of_a_dead_engine(started):
    server = started()
    with httpx.Client(base_url=server.url, verify=False) as connection:
        assert connection.get("/health").status_code == 200
        server.client.die()
        answer = connection.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "the engine has stopped"})
    assert server.wait() == 1


def test_queue_full(server):
    server.client.refusal = QueueFull("100 requests are waiting", retry_after=2.5)
    for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}, {"prompt": ["a", "b"]}):
        answer = server.post("/v1/completions", body)
        assert_error(answer, 429, None, "rate_limit_error")
        assert answer.headers["retry-after"] == "3"


def test_a_fault_of_ours_shows_nothing_of_itself(server, caplog):
    caplog.set_level("INFO", logger="jaxserve.access")
    server.client.refusal = KeyError("/secret/path")
    answer = server.post("/v1/completions", {"prompt": "a"}, headers={"x-request-id": "mine"})
    assert_error(answer, 500, None, "internal_error")
    assert answer.headers["x-request-id"] == "mine"
    assert "secret" not in answer.text
    wait_until(lambda: "jaxserve.access" in [record.name for record in caplog.records])
    assert "secret" in caplog.text  # but it is logged
    (line,) = [record.fields for record in caplog.records if record.name == "jaxserve.access"]
    assert (line["request_id"], line["status"]) == ("mine", 500)


def test_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            bind(ServerConfig(port=port))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_ours(host):
    with pytest.raises(StartupError, match=f"cannot listen on {host}:0"):
        bind(ServerConfig(host=host, port=0))


SERVE = """
import sys
sys.path.insert(0, "tests")
from engine.fake_client import FakeEngineClient
from server.serving import byte_tokenizer
from jaxserve.config import ServerConfig
from jaxserve.engine.frontend import Frontend
from jaxserve.server import bind, run
assert "jax" not in sys.modules
config = ServerConfig(port=0, shutdown_timeout=float(sys.argv[1]))
tokenizer = byte_tokenizer()
listener = bind(config)
client = FakeEngineClient(vocab_size=tokenizer.vocab_size, step_seconds=0.02)
print(listener.getsockname()[1], flush=True)
code = run(Frontend(client, tokenizer), config, listener=listener)
client.close()
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("name", "times", "is_whole"), [("SIGTERM", 1, True), ("SIGINT", 1, True), ("SIGTERM", 2, False)]
)
def test_signals(name, times, is_whole):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, "20"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        port = int(process.stdout.readline())
        text, is_complete = asyncio.run(_signal_while_streaming(process, port, getattr(signal, name), times))
        assert process.wait(timeout=20) == 0
        errors = process.stderr.read()
    finally:
        process.kill()
        process.communicate()
    assert "Traceback" not in errors
    assert is_complete == is_whole
    assert (text == "abc" * 20) == is_whole


async def _signal_while_streaming(process, port, number, times):
    """Streams 60 tokens, with signals from the first on. Returns the text and whether it came to its end."""
    transport = httpx.AsyncHTTPTransport(retries=10, verify=False)
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=20) as client,
        client.stream("POST", "/v1/completions", json={"prompt": "abc", "max_tokens": 60, "stream": True}) as response,
    ):
        lines = [line async for line in _after_first(response.aiter_lines(), process, number, times)]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert lines[-2] == "data: [DONE]"
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks if "choices" in chunk)
    return text, not any("error" in chunk for chunk in chunks)


async def _after_first(lines, process, number, times):
    is_first = True
    async for line in lines:
        yield line
        if is_first:
            is_first = False
            for _ in range(times):
                process.send_signal(number)
                await asyncio.sleep(0.2)
