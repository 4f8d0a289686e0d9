"""The limits on a request's size. What `fault_tables` has is sent by test_bad_requests."""

import asyncio
import concurrent.futures
import contextlib
import selectors
import threading

import pytest
from depths import quick_first
from serving import assert_error, assert_well, raw_post, running
from starlette.exceptions import HTTPException
from starlette.responses import Response
from waiting import PATIENCE, wait_until

from jaxserve.engine import memory
from jaxserve.server.generation import running as generation
from jaxserve.server.generation.running import MAX_PREPARING, MAX_TOKENIZING, THREAD_THRESHOLD, TURN_THRESHOLD
from jaxserve.server.middleware import admission

KEY = "s3cret-\u00e9"


@pytest.fixture(scope="module")
def locked(tokenizer):
    with running(tokenizer, api_key=[KEY], max_body_size=10_000) as server:
        yield server


def bearer(key):
    return {"authorization": b"Bearer " + key.encode(), "content-type": "application/json"}


def in_chunks(size):
    yield b'{"prompt": "'
    for _ in range(size // 1000):
        yield b"a" * 1000
    yield b'"}'


def test_chunked_body_over_the_cap(locked):
    answer = locked.post("/v1/completions", None, content=in_chunks(20_000), headers=bearer(KEY))
    assert_error(answer, 413, None)
    body = {"prompt": "ab", "max_tokens": 2}
    assert locked.post("/v1/completions", body, headers=bearer(KEY)).status_code == 200


def test_the_rest_of_a_body_over_the_cap_is_not_read(locked):
    with locked.connection() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n"
            b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n" % KEY.encode()
        )
        connection.sendall(b"3000\r\n" + b"a" * 0x3000 + b"\r\n")  # the chunk that ends the body never comes
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_body_under_the_cap(locked):
    answer = locked.post("/v1/completions", None, content=in_chunks(300), headers=bearer(KEY))
    assert answer.status_code == 200


@pytest.mark.parametrize("part", ["[1],", '{"a":1},', "1,"])
def test_a_body_that_would_take_long_to_decode(server, part):
    content = b'{"prompt":[' + part.encode() * (2**21 + 1) + b"1]}"
    headers = {"content-type": "application/json"}
    answer = server.post("/v1/completions", None, content=content[: 8 * 2**20], headers=headers)
    assert_error(answer, 400, None)
    assert "more than" in answer.json()["error"]["message"]
    assert_well(server)


def test_large_bodies_are_tokenized_in_their_turn(server, monkeypatch):
    """Others need not wait for them."""
    go_on, begun = threading.Event(), []

    def encode(text, add_special_tokens=True):
        begun.append(len(text))
        if len(text) >= TURN_THRESHOLD:
            go_on.wait(PATIENCE)
        return [1]

    monkeypatch.setattr(server.tokenizer, "encode", encode)

    def tokenize(length):
        return server.post("/tokenize", {"prompt": "x" * length}).status_code

    num_large = MAX_TOKENIZING + 8
    with concurrent.futures.ThreadPoolExecutor(num_large) as executor:
        large = [executor.submit(tokenize, TURN_THRESHOLD) for _ in range(num_large)]
        try:
            wait_until(lambda: server.server.state.life.num_inside == num_large and len(begun) >= MAX_TOKENIZING)
            assert tokenize(THREAD_THRESHOLD) == 200
            assert len(begun) == MAX_TOKENIZING + 1
        finally:
            go_on.set()
        assert [answer.result() for answer in large] == [200] * num_large
    assert len(begun) == num_large + 1


@pytest.mark.parametrize("size", quick_first([THREAD_THRESHOLD, TURN_THRESHOLD]))
def test_what_has_to_wait_too_long_for_its_turn_is_refused_and_what_nobody_waits_for_is_not_done(
    server, monkeypatch, size
):
    go_on, begun = threading.Event(), []

    def encode(text, add_special_tokens=True):
        if len(text) >= THREAD_THRESHOLD:
            begun.append(len(text))
            go_on.wait(PATIENCE)
        return [1]

    monkeypatch.setattr(server.tokenizer, "encode", encode)
    limit = MAX_TOKENIZING if size == TURN_THRESHOLD else MAX_PREPARING
    body = {"prompt": "x" * size}
    with concurrent.futures.ThreadPoolExecutor(limit) as executor:
        first = [executor.submit(server.post, "/tokenize", body) for _ in range(limit)]
        try:
            wait_until(lambda: len(begun) == limit)
            for _ in range(3):
                with server.connection() as connection:
                    connection.sendall(raw_post("/tokenize", body))
                    wait_until(lambda: server.server.state.life.num_inside == limit + 1)
                wait_until(lambda: server.server.state.life.num_inside == limit)
            monkeypatch.setattr(generation, "QUEUE_TIMEOUT", 0.05)
            answer = server.post("/tokenize", body)
            assert_error(answer, 429, None, "rate_limit_error")
            assert answer.headers["retry-after"] == "1"
            assert server.post("/tokenize", {"prompt": "x"}).status_code == 200
        finally:
            go_on.set()
        assert [answer.result().status_code for answer in first] == [200] * limit
    assert len(begun) == limit


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
@pytest.mark.parametrize("size", quick_first([THREAD_THRESHOLD, TURN_THRESHOLD]))
def test_the_prompts_of_a_client_that_has_gone_are_not_all_tokenized(server, monkeypatch, path, field, size):
    go_on, begun = threading.Event(), []

    def encode(text, add_special_tokens=True):
        begun.append(text)
        go_on.wait(PATIENCE)
        return [1]

    monkeypatch.setattr(server.tokenizer, "encode", encode)
    body = {field: ["x" * (size // 64)] * 64, "truncate_prompt_tokens": 3}
    try:
        with server.connection() as connection:
            connection.sendall(raw_post(path, body))
            wait_until(lambda: begun)
        wait_until(lambda: server.server.state.life.num_inside == 0)
    finally:
        go_on.set()
    assert server.post("/tokenize", {"prompt": "y" * size}).status_code == 200  # in its turn, after the other
    wait_until(lambda: len(begun) >= 2)
    assert [text[0] for text in begun] == ["x", "y"]


TOO_LONG = "naïve " * 2**20


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": TOO_LONG}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": TOO_LONG}]}, "messages"),
        ("/v1/completions", {"prompt": TOO_LONG, "truncate_prompt_tokens": 3}, "prompt"),
        ("/v1/completions", {"prompt": ["a", TOO_LONG], "truncate_prompt_tokens": -1}, "prompt[1]"),
        ("/v1/embeddings", {"input": TOO_LONG, "truncate_prompt_tokens": 3}, "input"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": TOO_LONG}], "truncate_prompt_tokens": 3},
            "messages",
        ),
    ],
)
def test_a_text_that_is_too_long_is_not_tokenized(server, monkeypatch, path, body, param):
    lengths, encode = [], server.tokenizer.encode_batch
    monkeypatch.setattr(
        server.tokenizer,
        "encode_batch",
        lambda texts, *rest: (lengths.extend(map(len, texts)), encode(texts, *rest))[1],
    )
    answer = server.post(path, body)
    assert_error(answer, 400, param)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert max(lengths, default=0) < 2**20
    assert_well(server)


def test_unfinished_bodies_are_bounded_all_together(tokenizer, monkeypatch):
    monkeypatch.setattr(admission, "MAX_HELD_BYTES", 0)
    with running(tokenizer, max_body_size=2**20) as server, contextlib.ExitStack() as stack:

        def begin():
            connection = stack.enter_context(server.connection())
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % 2**20
            )
            connection.sendall(b" " * (2**20 - 2))
            return connection

        unfinished = [begin() for _ in range(8)]
        waiting = selectors.DefaultSelector()
        for connection in unfinished:
            waiting.register(connection, selectors.EVENT_READ)
        refused = []
        while len(refused) < 6:  # the two that are accepted get no answer yet
            for key, _ in waiting.select(PATIENCE):
                waiting.unregister(key.fileobj)
                refused.append(key.fileobj)
        for connection in refused:
            head, _, body = connection.recv(2**16).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in head
            assert b'"type":"service_unavailable_error"' in body or not body
        small = "x" * (admission.FREE_BODY_BYTES // 2)
        assert server.post("/tokenize", {"prompt": small}).status_code == 200
        for connection in unfinished:
            connection.close()
        wait_until(lambda: server.server.state.life.num_inside == 0)
        assert server.post("/tokenize", {"prompt": "x" * (2**20 - 50)}).status_code == 200


def test_memory_of_large_bodies_is_given_back(server, monkeypatch):
    sizes = []
    monkeypatch.setattr(memory, "_malloc_trim", sizes.append)
    assert server.post("/tokenize", {"prompt": "x" * THREAD_THRESHOLD}).json()["count"] == THREAD_THRESHOLD + 1
    assert sizes == []
    assert server.post("/tokenize", {"prompt": "x" * TURN_THRESHOLD}).status_code == 200
    assert sizes == [0]
    body = {"prompt": "x" * TURN_THRESHOLD, "truncate_prompt_tokens": 5, "structured_outputs": {"regex": "a"}}
    assert server.post("/v1/completions", body).status_code == 200
    assert sizes == [0, 0]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_client_that_reads_only_when_it_has_sent_all_has_its_answer(server, monkeypatch, is_chunked):
    body = b"x" * 2**25
    framing = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(body)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%b\r\n\r\n" % framing
    with server.connection() as connection:
        connection.sendall(head + (b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body))
        answer = b""
        while data := connection.recv(2**16):
            answer += data
    assert answer.startswith(b"HTTP/1.1 413 ")
    monkeypatch.setattr(admission, "MAX_DISCARDED_BYTES", 2**20)
    connection = server.connection()
    with connection, pytest.raises(ConnectionError):
        connection.sendall(head + (b"%x\r\n%b" % (len(body), body) if is_chunked else body))
    assert_well(server)


@pytest.mark.parametrize("case", ["it has come", "it does not come", "it comes when it is asked for"])
def test_how_long_an_answer_waits_for_a_body_that_is_too_large(monkeypatch, case):
    """uvicorn says nothing more once it has handed on the last part, until the client goes."""
    monkeypatch.setattr(admission, "LINGERING_SECONDS", 0.01 if case == "it does not come" else 2 * PATIENCE)
    parts = [{"type": "http.request", "body": b"x" * 5, "more_body": True}] * 2
    headers = []
    if case == "it has come":
        parts[1] = parts[1] | {"more_body": False}
    if case == "it comes when it is asked for":
        headers, parts = [(b"content-length", b"10"), (b"expect", b"100-continue")], []
    sent = []

    async def receive():
        assert headers == []
        if not parts:
            await asyncio.Event().wait()
        return parts.pop(0)

    async def send(message):
        sent.append(message)

    async def read_all(scope, receive, send):
        try:
            while (await receive())["more_body"]:
                pass
        except HTTPException as error:
            await Response(status_code=error.status_code)(scope, receive, send)

    limits = admission.Limits(read_all, max_body_size=9)
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    asyncio.run(asyncio.wait_for(limits(scope, receive, send), PATIENCE))
    assert sent[0]["status"] == 413
    assert not sent[-1].get("more_body", False)
