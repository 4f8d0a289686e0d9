"""How a request is observed from outside: its id, its log line, its span; and its timeouts."""

import asyncio
import contextlib
import json
import logging
import re
import threading
import time
import types

import pytest
from fake_client import Script
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from serving import assert_error, frames, running
from waiting import PATIENCE, wait_until

from jaxserve import logs
from jaxserve.errors import ConfigError
from jaxserve.server import tracing
from jaxserve.server.generation import running as generation
from jaxserve.server.process import lifecycle

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 17\r\n\r\n"
BODY = b'{"prompt": "abc"}'


@pytest.fixture
def access(caplog):
    caplog.set_level(logging.DEBUG, logger="jaxserve.access")

    def lines(*ids):
        """Return the log lines of these requests: one of an earlier test may come late."""

        def found():
            records = [record for record in caplog.records if record.name == "jaxserve.access"]
            return {record.fields["request_id"]: record for record in records}

        wait_until(lambda: found().keys() >= set(ids))
        return [found()[request_id] for request_id in ids]

    return lines


def test_the_clients_id_comes_back_and_stands_in_the_log(server, access):
    body = {"prompt": "ab", "max_tokens": 2}
    answer = server.post("/v1/completions", body, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    stream = server.post("/v1/completions", {**body, "stream": True}, headers={"x-request-id": "mine-2"})
    assert stream.headers["x-request-id"] == "mine-2"
    frames(stream)
    missing = server.get("/nowhere")
    first, second, third = access("mine-1", "mine-2", missing.headers["x-request-id"])
    assert re.fullmatch(r"127\.0\.0\.1 POST '/v1/completions' 200 \d+\.\d{3} s id=mine-1", first.getMessage())
    assert (second.fields["status"], second.fields["path"]) == (200, "/v1/completions")
    assert (third.fields["status"], third.fields["path"]) == (404, "/nowhere")


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "ä".encode()])
def test_an_id_that_could_do_harm_is_replaced(server, given):
    headers = {} if given is None else {"X-Request-Id": given}
    ids = [server.get("/version", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert all(len(request_id) == 32 for request_id in ids)
    assert ids[0] != ids[1]


def test_a_path_cannot_forge_a_line(server, access):
    server.get("/%0a127.0.0.1%20GET", headers={"X-Request-Id": "forger"})
    (record,) = access("forger")
    assert "\n" not in record.getMessage()


@pytest.mark.slow
def test_probes_are_quiet_and_a_client_that_leaves_is_a_499(server, access):
    server.get("/health", headers={"X-Request-Id": "probe"})
    server.play = lambda request: Script(token_ids=[70], hangs=True)
    head = HEAD.replace(b"\r\n\r\n", b"\r\nX-Request-Id: %b\r\n\r\n")
    for request_id, body in ((b"stream", b'{"prompt":"a","stream":true}'), (b"whole", BODY)):
        with server.connection() as connection:
            connection.sendall(head.replace(b"17", b"%d" % len(body)) % request_id + body)
            wait_until(lambda: server.client.num_running == 1)
            if request_id == b"stream":
                assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        wait_until(lambda: server.client.num_running == 0)
    probe, stream, whole = access("probe", "stream", "whole")
    assert probe.levelname == "DEBUG"
    assert (stream.levelname, stream.fields["status"]) == ("INFO", 200)
    assert whole.fields["status"] == 499


def test_refusals_have_an_id_too(tokenizer):
    with running(tokenizer, api_key=["secret"]) as server:
        answer = server.get("/v1/models", headers={"X-Request-Id": "who"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (401, "who")


def test_without_an_access_log(tokenizer, caplog):
    caplog.set_level(logging.DEBUG, logger="jaxserve.access")
    with running(tokenizer, access_log=False) as server:
        request_id = server.get("/version").headers["x-request-id"]
    assert request_id not in caplog.text


def test_json_lines():
    record = logging.LogRecord("jaxserve.x", logging.WARNING, __file__, 1, "%s\nlines", ("two",), None)
    setattr(record, logs.FIELDS, {"status": 200})
    line = logs.JsonFormatter().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {"level": "warning", "logger": "jaxserve.x", "message": "two\nlines", "status": 200}


def test_json_lines_have_the_traceback():
    try:
        raise ValueError("odd")
    except ValueError as error:
        exception = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("jaxserve.x", logging.ERROR, __file__, 1, "it failed", (), exception)
    assert "ValueError: odd" in json.loads(logs.JsonFormatter().format(record))["traceback"]


def test_one_span_a_request_with_where_its_time_went(tokenizer, monkeypatch):
    exporter = InMemorySpanExporter()
    endpoints = []
    seen = threading.Semaphore(0)
    observe = generation._Observer.observe

    def step_time():
        assert seen.acquire(timeout=PATIENCE)  # the server has the step's outputs
        time.sleep(0.05)

    def start(endpoint):
        endpoints.append(endpoint)
        return tracing.Tracing(tracing.provider_of([SimpleSpanProcessor(exporter)]))

    monkeypatch.setattr(lifecycle, "start_tracing", start)
    monkeypatch.setattr(generation._Observer, "observe", lambda *args: (observe(*args), seen.release()))
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    with running(tokenizer, otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as server:
        server.client.pause = step_time
        body = {"prompt": "abc", "max_tokens": 4, "n": 2}
        headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01", "X-Request-Id": "mine"}
        for stream in (False, True):
            assert server.post("/v1/completions", {**body, "stream": stream}, headers=headers).status_code == 200
        assert server.post("/v1/completions", {"prompt": []}).status_code == 400
        for path in ("/v1/responses/resp_1", "/v1/models/a/b", "/nothing/1"):
            server.get(path)
        server.get("/health")
    assert endpoints == ["http://127.0.0.1:9/v1/traces"]
    *served, refused, response, model, nothing = exporter.get_finished_spans()
    names = [span.name for span in (response, model, nothing)]
    assert names == ["GET /v1/responses/{response_id}", "GET /v1/models/{model}", "GET"]
    assert response.attributes["url.path"] == "/v1/responses/resp_1"
    for span in served:
        assert (span.name, span.kind) == ("POST /v1/completions", SpanKind.SERVER)
        assert f"{span.context.trace_id:032x}" == trace
        attributes = dict(span.attributes)
        parts = [
            attributes.pop(f"gen_ai.latency.time_in_{part}") for part in ("queue", "model_prefill", "model_decode")
        ]
        assert all(part >= 0 for part in parts)
        assert parts[2] > 0.1  # three steps
        assert sum(parts) < (span.end_time - span.start_time) / 1e9
        assert attributes == {
            "http.request.method": "POST",
            "http.response.status_code": 200,
            "url.path": "/v1/completions",
            "http.route": "/v1/completions",
            "gen_ai.request.id": "mine",
            "gen_ai.usage.prompt_tokens": 4,
            "gen_ai.usage.completion_tokens": 8,
        }
    assert refused.attributes["http.response.status_code"] == 400
    assert "gen_ai.usage.prompt_tokens" not in refused.attributes


def test_tracing_without_opentelemetry_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"install jaxserve\[otel\]"):
        tracing.start_tracing("http://127.0.0.1:9")


def test_a_request_that_takes_too_long(tokenizer, monkeypatch):
    limits = []

    def timeout(seconds):
        limits.append((asyncio.get_running_loop(), asyncio.timeout(seconds)))
        return limits[-1][1]

    def expire(content):
        if b'"text"' in content and limits:
            loop, limit = limits.pop()
            loop.call_soon_threadsafe(limit.reschedule, 0.0)

    with running(tokenizer, request_timeout=0.1) as server:
        server.play = lambda request: Script(token_ids=[70], hangs=True)
        answer = server.post("/v1/completions", {"prompt": ["a", "b"]})
        assert_error(answer, 504, None, "timeout_error")
        assert "longer than 0.1 s" in answer.text
        server.server.state.runner.request_timeout = PATIENCE
        monkeypatch.setattr(generation, "asyncio", types.SimpleNamespace(**vars(asyncio) | {"timeout": timeout}))
        body = {"prompt": "a", "stream": True}
        *chunks, last = frames(server.stream("/v1/completions", body, on_data=expire))
        assert chunks[0]["choices"][0]["text"]
        assert last["error"]["type"] == "timeout_error"
        wait_until(lambda: server.client.num_running == 0)
        server.says("quick")
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200


def slow_sender(server, clock, pieces, *, pause):
    """Return the server's answer to a client that lets `pause` seconds pass after each piece."""
    with server.connection() as connection:
        wait_until(lambda: clock.num_open == 1)
        num_sent = clock.num_received
        for piece in pieces:
            with contextlib.suppress(ConnectionError):
                connection.sendall(piece)
            num_sent += len(piece)
            wait_until(lambda: clock.num_received == num_sent or clock.num_open == 0)  # noqa: B023
            clock.advance(pause)
        answer = read_answer(connection.makefile("rb"))
    wait_until(lambda: clock.num_open == 0)
    return answer


def read_answer(file):
    """Return the status and the body of the next answer on a connection."""
    status = int(file.readline().split()[1])
    length = 0
    while line := file.readline().lower().strip():
        if line.startswith(b"content-length:"):
            length = int(line.split()[1])
    return status, file.read(length)


def test_slow_senders_are_refused(tokenizer, wire_clock):
    with running(tokenizer, receive_timeout=30) as server:
        for pieces in ([b""] * 4, [HEAD[i : i + 1] for i in range(6)], [HEAD, *(BODY[i : i + 1] for i in range(6))]):
            status, body = slow_sender(server, wire_clock, pieces, pause=10)
            assert status == 408, pieces
            assert "took too long" in json.loads(body)["error"]["message"]
        wait_until(lambda: server.server.state.life.num_inside == 0)


def test_who_is_slow_but_in_time_is_answered(tokenizer, wire_clock):
    """The head and the body have their time each."""
    with running(tokenizer, receive_timeout=10) as server:
        pieces = [HEAD[:30], HEAD[30:] + BODY[:5], BODY[5:]]
        assert slow_sender(server, wire_clock, pieces, pause=9)[0] == 200


def test_an_answer_may_take_longer_than_a_request(tokenizer, wire_clock):
    """Also while the head of the next one is there already, which has its time when the answer is complete."""
    go_on = threading.Event()
    with (
        running(tokenizer, receive_timeout=10) as server,
        server.connection() as connection,
    ):
        server.client.pause = lambda: go_on.wait(PATIENCE)
        file = connection.makefile("rb")
        connection.sendall(HEAD + BODY + HEAD[:30])
        wait_until(lambda: wire_clock.num_received == len(HEAD + BODY) + 30 and server.client.num_running == 1)
        for seconds in (13, 7):
            wire_clock.advance(seconds)
        go_on.set()
        assert read_answer(file)[0] == 200
        wire_clock.advance(9)
        connection.sendall(HEAD[30:] + BODY)
        assert read_answer(file)[0] == 200


def test_a_head_without_end(tokenizer):
    with running(tokenizer) as server, server.connection() as connection:
        with contextlib.suppress(ConnectionError):  # the server does not read it to its end
            connection.sendall(b"GET / HTTP/1.1\r\n" + (b"x: " + b"y" * 10_000 + b"\r\n") * 27)
        assert connection.recv(100).startswith(b"HTTP/1.1 431 ")
        assert server.get("/version").status_code == 200


def test_a_client_that_takes_nothing_is_dropped(tokenizer):
    with running(tokenizer, send_timeout=0.5, client_options={"max_model_len": 2**20}) as server:
        server.play = lambda request: Script(token_ids=[70], hangs=True)
        # Each choice repeats the prompt: 6 MB in all, more than the kernel keeps for a client.
        body = json.dumps({"prompt": "a" * 200_000, "echo": True, "n": 32, "stream": True}).encode()
        with server.connection() as connection:
            connection.sendall(HEAD.replace(b"17", b"%d" % len(body)) + body)
            wait_until(lambda: len(server.client.submitted) == 32)
            wait_until(lambda: server.client.num_running == server.server.state.life.num_inside == 0)
