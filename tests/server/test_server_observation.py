"""What is seen of a request from outside: its id, its line in the log, its span; and how long it may take."""

import json
import logging
import socket
import time

import httpx
import pytest
from engine.fake_client import Script
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from server.serving import assert_error, frames, running
from waiting import wait_until

from jaxserve import logs
from jaxserve.errors import ConfigError
from jaxserve.server import lifecycle, tracing


@pytest.fixture
def access(caplog):
    caplog.set_level(logging.DEBUG, logger="jaxserve.access")

    def lines(server, count):
        def found():
            return [record for record in caplog.records if record.name == "jaxserve.access"]

        wait_until(lambda: len(found()) >= count)
        return found()

    return lines


def test_the_clients_id_comes_back_and_stands_in_the_log(server, access):
    body = {"prompt": "ab", "max_tokens": 2}
    answer = server.post("/v1/completions", body, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    stream = server.post("/v1/completions", {**body, "stream": True}, headers={"x-request-id": "mine-2"})
    assert stream.headers["x-request-id"] == "mine-2"
    frames(stream)
    missing = server.get("/nowhere")
    first, second, third = access(server, 3)
    assert first.getMessage().startswith("127.0.0.1 POST '/v1/completions' 200 0.")
    assert first.getMessage().endswith("id=mine-1")
    assert second.fields["request_id"] == "mine-2"
    assert (third.fields["status"], third.fields["path"]) == (404, "/nowhere")
    assert third.fields["request_id"] == missing.headers["x-request-id"]


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "ä".encode()])
def test_an_id_that_could_do_harm_is_replaced(server, given):
    headers = {} if given is None else {"X-Request-Id": given}
    ids = [server.get("/version", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert all(len(request_id) == 32 for request_id in ids)
    assert ids[0] != ids[1]


def test_a_path_cannot_forge_a_line(server, access):
    server.get("/%0a127.0.0.1%20GET")
    (record,) = access(server, 1)
    assert "\n" not in record.getMessage()


def test_probes_are_quiet_and_a_client_that_leaves_is_a_499(server, access):
    server.get("/health")
    server.play = lambda request: Script(token_ids=[70], hangs=True)
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={"prompt": "a", "stream": True}, verify=False
    ) as answer:
        assert answer.status_code == 200
        next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=0.2, verify=False)
    probe, stream, whole = access(server, 3)
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
        assert "x-request-id" in server.get("/version").headers
    assert "jaxserve.access" not in {record.name for record in caplog.records}


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

    def start(endpoint):
        endpoints.append(endpoint)
        return tracing.Tracing(tracing.provider_of([SimpleSpanProcessor(exporter)]))

    monkeypatch.setattr(lifecycle, "start_tracing", start)
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    with running(
        tokenizer, otlp_traces_endpoint="http://127.0.0.1:9/v1/traces", client_options={"step_seconds": 0.05}
    ) as server:
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
        assert parts[2] > 0.02
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


def test_a_request_that_takes_too_long(tokenizer):
    with running(tokenizer, request_timeout=0.1) as server:
        server.play = lambda request: Script(token_ids=[70], hangs=True)
        answer = server.post("/v1/completions", {"prompt": ["a", "b"]})
        assert_error(answer, 504, None, "timeout_error")
        assert "longer than 0.1 s" in answer.text
        server.server.state.request_timeout = 1.5  # for a busy machine to bring a token
        *chunks, last = frames(server.post("/v1/completions", {"prompt": "a", "stream": True}))
        assert chunks[0]["choices"][0]["text"]
        assert last["error"]["type"] == "timeout_error"
        wait_until(lambda: server.client.num_running == 0)
        server.server.state.request_timeout = 20
        server.says("quick")
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200


def slow_sender(server, pieces, pause=0.1):
    """What the server says to one who sends so slowly."""
    with socket.create_connection(server.server.address, timeout=20) as connection:
        for piece in pieces:
            try:
                connection.sendall(piece)
            except OSError:
                break
            time.sleep(pause)
        answer = b""
        while data := connection.recv(65536):
            answer += data
    return answer


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 17\r\n\r\n"
BODY = b'{"prompt": "abc"}'


def test_slow_senders_are_refused(tokenizer):
    with running(tokenizer, receive_timeout=0.3) as server:
        for pieces in (
            [],
            [HEAD[i : i + 1] for i in range(6)],
            [HEAD, *(BODY[i : i + 1] for i in range(6))],
        ):
            answer = slow_sender(server, pieces)
            assert answer.startswith(b"HTTP/1.1 408 "), pieces
            assert "took too long" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        wait_until(lambda: server.server.state.num_inside == 0)


def test_who_is_slow_but_in_time_is_answered(tokenizer):
    """The head and the body have their time each."""
    with running(tokenizer, receive_timeout=1.0, keep_alive_timeout=1) as server:
        answer = slow_sender(server, [HEAD[:30], HEAD[30:], BODY[:5], BODY[5:]])
        assert answer.startswith(b"HTTP/1.1 200 ")
        # An answer may take longer than a request, also while the head of the next one is there already.
        server.play = lambda request: Script(token_ids=[70] * 12)
        server.client._step_seconds = 0.1
        body = b'{"prompt": "abc", "max_tokens": 12}'
        request = HEAD.replace(b"17", b"%d" % len(body)) + body
        answer = slow_sender(server, [request + HEAD[:30], *[b""] * 13, HEAD[30:] + BODY])
        assert answer.count(b"HTTP/1.1 200 ") == 2
        assert b"408" not in answer


def test_a_head_without_end(tokenizer):
    with running(tokenizer) as server:
        answer = slow_sender(server, [b"GET / HTTP/1.1\r\n", *([b"x: " + b"y" * 10_000 + b"\r\n"] * 27)], pause=0.01)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert server.get("/version").status_code == 200


def test_a_client_that_takes_nothing_is_dropped(tokenizer):
    with running(tokenizer, send_timeout=0.5, client_options={"max_model_len": 2**20}) as server:
        server.play = lambda request: Script(token_ids=[70], hangs=True)
        # Each choice repeats the prompt: 6 MB in all, more than the kernel keeps for a client.
        body = json.dumps({"prompt": "a" * 200_000, "echo": True, "n": 32, "stream": True}).encode()
        with socket.create_connection(server.server.address, timeout=20) as connection:
            connection.sendall(HEAD.replace(b"17", b"%d" % len(body)) + body)
            wait_until(lambda: len(server.client.submitted) == 32)
            wait_until(lambda: server.client.num_running == server.server.state.num_inside == 0)
