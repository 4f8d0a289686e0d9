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
from depths import quick_first
from fake_client import Script
from serving import RunningFake, assert_error, frames
from waiting import PATIENCE, wait_until

from jaxserve.config import ServerConfig
from jaxserve.errors import QueueFull, StartupError
from jaxserve.server import bind
from jaxserve.server.process import lifecycle
from jaxserve.server.process.endings import how_it_ended

ROOT = pathlib.Path(__file__).parents[3]


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
        self.response = self.server.stream("/v1/completions", self.body, on_data=lambda _: self.begun.set())

    def result(self):
        self.join(PATIENCE)
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
    server = started(shutdown_timeout=PATIENCE)
    go_on = threading.Event()
    server.client.pause = lambda: go_on.wait(PATIENCE)
    stream = Stream(server, max_tokens=60)
    assert stream.begun.wait(PATIENCE)
    with httpx.Client(base_url=server.url, timeout=PATIENCE, verify=False) as open_connection:
        assert open_connection.get("/health").status_code == 200
        server.server.stop()
        wait_until(lambda: server.server.state.life.is_draining)
        answer = open_connection.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "the server is shutting down"})
        assert open_connection.get("/live").status_code == 200
        assert open_connection.get("/metrics").status_code == 200
        refused = open_connection.post("/v1/completions", json={"prompt": "a"})
    assert_error(refused, 503, None, "service_unavailable_error")
    assert stream.is_alive()
    go_on.set()
    chunks = frames(stream.result())
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc" * 20
    assert server.wait() == 0
    with pytest.raises(httpx.ConnectError):
        server.get("/live")


@pytest.mark.parametrize(
    ("number", "message"),
    [(0, "shutting down"), (1, "shutting down: 1 request may finish"), (2, "shutting down: 2 requests may finish")],
)
def test_what_may_finish_is_said(started, caplog, number, message):
    caplog.set_level("INFO", logger="jaxserve.server.process.lifecycle")
    server = started(shutdown_timeout=0)
    server.play = lambda request: Script(token_ids=[70], hangs=True)
    streams = [Stream(server) for _ in range(number)]
    assert all(stream.begun.wait(PATIENCE) for stream in streams)
    server.server.stop()
    assert server.wait() == 0
    assert message in caplog.messages


def test_drain_waits_for_a_client_that_reads_slowly(started, monkeypatch):
    """Its answer is out of our hands, but not yet on its way."""
    monkeypatch.setattr(lifecycle, "FLUSH_TIMEOUT", 0)
    server = started(shutdown_timeout=PATIENCE)
    listener = server.server._listener
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections have it from there
    body = json.dumps({"prompt": "abc" * 100, "echo": True, "max_tokens": 1, "n": 128}).encode()
    with socket.socket() as client:
        client.settimeout(PATIENCE)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.server.address)
        headers = {"Host": "x", "Connection": "close", "Content-Type": "application/json", "Content-Length": len(body)}
        lines = ["POST /v1/completions HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        client.sendall("\r\n".join(lines).encode() + body)
        answer = client.recv(1)
        wait_until(lambda: server.server.state.life.num_inside == 0)
        server.server.stop()
        wait_until(lambda: server.server.state.life.is_draining)
        server._thread.join(0.5)  # one that did not wait would have ended
        while data := client.recv(2**16):
            answer += data
    content = answer.split(b"\r\n\r\n", 1)[1]
    assert len(json.loads(content)["choices"]) == 128
    assert server.wait() == 0


def test_drain_gives_up_after_the_timeout(started):
    server = started(shutdown_timeout=0.3)
    server.play = lambda request: Script(token_ids=[70], hangs=True)
    stream, whole = Stream(server), Stream(server, stream=False)
    wait_until(lambda: server.client.num_running == 2)
    assert stream.begun.wait(PATIENCE)
    server.server.stop()
    assert server.wait() == 0
    assert_error(whole.result(), 503, None, "service_unavailable_error")
    assert frames(stream.result())[-1]["error"]["type"] == "service_unavailable_error"
    assert server.client.num_running == 0


def test_a_second_stop_ends_the_wait(started):
    server = started(shutdown_timeout=10 * PATIENCE)
    server.play = lambda request: Script(token_ids=[], hangs=True)
    stream = Stream(server)
    wait_until(lambda: server.client.num_running == 1)
    server.server.stop()
    wait_until(lambda: server.server.state.life.is_draining)
    server.server.stop()
    assert server.wait() == 0
    assert_error(stream.result(), 503, None, "service_unavailable_error")


@pytest.mark.parametrize("silently", quick_first([False, True]))
def test_death_of_the_engine(started, silently):
    server = started()
    server.play = lambda request: Script(token_ids=[70], hangs=True)
    stream, whole = Stream(server), Stream(server, stream=False)
    wait_until(lambda: server.client.num_running == 2)
    assert stream.begun.wait(PATIENCE)
    server.client.die("the device is gone", silently=silently)
    assert_error(whole.result(), 503, None, "service_unavailable_error")
    assert frames(stream.result())[-1]["error"]["type"] == "service_unavailable_error"
    assert "device" not in whole.response.text
    assert server.wait() == 1


@pytest.mark.parametrize(
    ("reason", "code", "said"),
    [
        (
            "the engine has stopped: RESOURCE_EXHAUSTED: Out of memory\nmore",
            1,
            "run out of memory: the engine has stop",
        ),
        ("the engine has stopped: MemoryError", None, "the engine has run out of memory"),
        ("the engine has stopped: a bug", None, "given up: the engine has stopped: a bug"),
        (None, -9, "for lack of memory"),
        (None, 1, "ended with code 1"),
        (None, None, "gone silent"),
    ],
)
def test_the_last_line_says_how_the_engine_ended(reason, code, said):
    line = how_it_ended("the engine", reason, code)
    assert said in line
    assert "\n" not in line


def test_health_of_a_dead_engine(started):
    server = started()
    server.play = lambda request: Script(token_ids=[], hangs=True)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    with server.connection() as inside:
        inside.sendall(head)  # the server does not end while a request is inside
        wait_until(lambda: server.server.state.life.num_inside == 1)
        server.client.die()
        answer = server.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "the engine has stopped"})
    assert server.wait() == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/responses", {"input": "a"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_queue_full(server, path, body, stream):
    server.client.refusal = QueueFull("100 requests are waiting", retry_after=2.5)
    answer = server.post(path, body | {"stream": stream})
    assert_error(answer, 429, None, "rate_limit_error")
    assert answer.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "stream": True}),  # it fails before the first byte
        ("/v1/responses", {"input": "a"}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
    ],
)
def test_a_sequence_that_fails_in_the_engine(server, path, body):
    server.play = lambda request: Script(token_ids=[], error="NaN in the logits")
    answer = server.post(path, body)
    assert_error(answer, 500, None, "internal_error")
    assert answer.json()["error"]["message"] == "NaN in the logits"


def test_a_fault_of_ours_shows_nothing_of_itself(server, caplog):
    caplog.set_level("INFO", logger="jaxserve.access")
    server.client.refusal = KeyError("/secret/path")
    answer = server.post("/v1/completions", {"prompt": "a"}, headers={"x-request-id": "mine"})
    assert_error(answer, 500, None, "internal_error")
    assert answer.headers["x-request-id"] == "mine"
    assert "secret" not in answer.text
    wait_until(lambda: "id=mine" in caplog.text)
    assert "secret" in caplog.text  # but it is logged
    (line,) = [record.fields for record in caplog.records if "id=mine" in record.getMessage()]
    assert line["status"] == 500


def test_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            bind(ServerConfig(port=port))


def test_early_clients_wait():
    with bind(ServerConfig(port=0)) as listener, socket.create_connection(listener.getsockname(), PATIENCE):
        pass


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_ours(host):
    with pytest.raises(StartupError, match=f"cannot listen on {host}:0"):
        bind(ServerConfig(host=host, port=0))


SERVE = """
import sys
sys.path.insert(0, "tests/support")
from fake_client import FakeEngineClient, Script, echo
from serving import byte_tokenizer
from jaxserve.config import ServerConfig
from jaxserve.engine.frontend import Frontend
from jaxserve.server import bind, run
from jaxserve.server.process import lifecycle
assert "jax" not in sys.modules
lifecycle.FLUSH_TIMEOUT = float(sys.argv[1])
config = ServerConfig(port=0, shutdown_timeout=float(sys.argv[1]))
tokenizer = byte_tokenizer()
listener = bind(config)
echoed = lambda request: Script(token_ids=echo(request).token_ids[: int(sys.argv[2])], hangs=True)
client = FakeEngineClient(echoed, vocab_size=tokenizer.vocab_size, step_seconds=0.02)
print(listener.getsockname()[1], flush=True)
code = run(Frontend(client, tokenizer), config, listener=listener)
client.close()
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "times", "is_whole"), quick_first([("SIGTERM", 1, True), ("SIGINT", 1, True), ("SIGTERM", 2, False)])
)
def test_signals(name, times, is_whole):
    command = [sys.executable, "-c", SERVE, str(10 * PATIENCE), "60" if is_whole else "30"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        port = int(process.stdout.readline())
        text, is_complete = asyncio.run(_signal_while_streaming(process, port, getattr(signal, name), times))
        assert process.wait(timeout=PATIENCE) == 0
        errors = process.stderr.read()
    finally:
        process.kill()
        process.communicate()
    assert "Traceback" not in errors
    assert is_complete == is_whole
    assert (text == "abc" * 20) == is_whole


async def _signal_while_streaming(process, port, number, times):
    """Streams 60 tokens, with signals from the first on, each when the one before has been heard.

    Returns the text and whether it came to its end.
    """
    transport = httpx.AsyncHTTPTransport(retries=10, verify=False)
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=PATIENCE) as client,
        client.stream("POST", "/v1/completions", json={"prompt": "abc", "max_tokens": 60, "stream": True}) as response,
    ):
        lines = []
        async for line in response.aiter_lines():
            lines.append(line)
            if len(lines) == 1:
                for _ in range(times - 1):
                    process.send_signal(number)
                    while (await client.get("/health")).status_code != 503:
                        await asyncio.sleep(0.01)
                process.send_signal(number)
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert lines[-2] == "data: [DONE]"
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks if "choices" in chunk)
    return text, not any("error" in chunk for chunk in chunks)
