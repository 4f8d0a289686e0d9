"""Server-sent events: their grammar, errors after the first byte, and what happens when the client goes."""

import itertools
import socket
import threading

import httpx
import pytest
from fake_client import Script
from serving import asynchronous, frames, raw_post, running, synchronous
from waiting import PATIENCE, wait_until

USER = {"role": "user", "content": "hello"}


def test_completions_with_the_openai_client(server):
    with synchronous(server) as client:
        chunks = list(client.completions.create(model="fake", prompt="abc", max_tokens=7, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abcabca"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_chat_with_the_async_openai_client(server):
    server.says("good day")
    async with asynchronous(server) as client:
        stream = await client.chat.completions.create(model="fake", messages=[USER], stream=True)
        chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "good day"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk.object == "chat.completion.chunk" and chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("tokens_per_step", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        None,
        {"include_usage": True},
        {"continuous_usage_stats": True},
        {"include_usage": True, "continuous_usage_stats": True},
    ],
)
def test_grammar_of_chat(server, n, tokens_per_step, options):
    server.says("naïve 🙂 text", tokens_per_step=tokens_per_step)
    body = {"messages": [USER], "stream": True, "n": n, "stream_options": options}
    chunks = frames(server.post("/v1/chat/completions", body))
    if options and options.get("include_usage"):
        *chunks, last = chunks
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == n * len("naïve 🙂 text".encode())
        if options.get("continuous_usage_stats"):
            roles = [chunk for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
            assert all(chunk["usage"]["completion_tokens"] == 0 for chunk in roles)
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk not in roles]
            assert counts == sorted(counts)
            assert counts[-1] == n * len("naïve 🙂 text".encode())
        else:
            assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    for index in range(n):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "naïve 🙂 text"
        assert not any("\ufffd" in choice["delta"].get("content", "") for choice in choices)
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


def test_continuations_interleave(server, monkeypatch):
    """Each token is sent when it arrives. The engine waits for all requests, and after each step for the reader."""
    received = b""

    def take(content):
        nonlocal received
        received = content

    def pause():
        wait_until(lambda: len(server.client.submitted) == 4)
        wait_until(lambda: received.count(b"data: {") >= server.client.num_output_tokens - before)

    server.play = lambda request: Script(token_ids=[70] * 20)
    before = server.client.num_output_tokens
    monkeypatch.setattr(server.client, "pause", pause)
    body = {"prompt": ["a", "b"], "n": 2, "stream": True, "max_tokens": 20}
    answer = server.stream("/v1/completions", body, on_data=take)
    order = [chunk["choices"][0]["index"] for chunk in frames(answer)]
    assert sorted(set(order)) == [0, 1, 2, 3]
    last = {index: max(i for i, other in enumerate(order) if other == index) for index in range(4)}
    assert all(order.index(a) < last[b] for a, b in itertools.permutations(range(4), 2))


def test_no_prefix_of_a_stop_string_is_sent(server):
    server.says("a STOX b STOP c")
    body = {"prompt": "x", "stream": True, "stop": ["STOP"], "max_tokens": 100}
    pieces = [chunk["choices"][0]["text"] for chunk in frames(server.post("/v1/completions", body))]
    shown = ""
    for piece in pieces:
        shown += piece
        assert not shown.endswith(("S", "ST", "STO"))
    assert shown == "a STOX b "


def test_echo_logprobs_and_token_ids_in_pieces(server):
    body = {
        "prompt": "abc",
        "stream": True,
        "echo": True,
        "logprobs": 1,
        "max_tokens": 4,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    *chunks, last = frames(server.post("/v1/completions", body))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "abcabca"
    assert [x for choice in choices for x in choice["logprobs"]["token_logprobs"]] == [None] + [-1.5] * 7
    assert [x for choice in choices for x in choice["logprobs"]["text_offset"]] == [0, *range(7)]
    assert choices[0]["prompt_token_ids"] == server.tokenizer.encode("abc")
    assert not any("prompt_token_ids" in choice for choice in choices[1:])
    assert len([x for choice in choices for x in choice["token_ids"]]) == 4
    assert last["usage"]["completion_tokens"] == 4


def test_scoring_as_a_stream(server):
    body = {"prompt": "abc", "stream": True, "echo": True, "logprobs": 1, "max_tokens": 0}
    (chunk,) = frames(server.post("/v1/completions", body))
    assert chunk["choices"][0]["text"] == "abc"
    assert chunk["choices"][0]["finish_reason"] == "length"


def test_chat_logprobs_in_pieces(server):
    server.says("é!")
    body = {"messages": [USER], "stream": True, "logprobs": True, "top_logprobs": 1}
    choices = [chunk["choices"][0] for chunk in frames(server.post("/v1/chat/completions", body))]
    tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == "é!"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abc", "logprobs": 2, "echo": True, "n": 2}),
        ("/v1/chat/completions", {"messages": [USER], "logprobs": True, "top_logprobs": 2, "n": 2}),
        ("/v1/responses", {"input": "abc", "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    ],
)
def test_logprobs_that_were_sent_are_forgotten(server, monkeypatch, path, body):
    groups = []
    prepare = server.frontend.prepare

    def remember(*args, **kwargs):
        groups.append(prepare(*args, **kwargs))
        return groups[-1]

    monkeypatch.setattr(server.frontend, "prepare", remember)
    server.says("good day")
    answer = server.post(path, body | {"stream": True})
    sent = len("good day")  # of the tokens, in however many chunks: each with the alternative of it
    assert answer.text.count("-1.5") >= body.get("n", 1) * sent
    (group,) = groups
    result = group.result()
    assert all(output.text == "good day" and output.logprobs == [] for output in result.outputs)
    assert result.prompt_logprobs is None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_error_after_the_first_byte_is_an_event(server, step_by_step, path):
    server.play = lambda request: Script(token_ids=[70, 71], error="NaN in the logits")
    body = {"prompt": "abc", "messages": [USER], "stream": True}
    *chunks, last = frames(server.stream(path, body, on_data=lambda _: step_by_step.set()))
    error = {"message": "NaN in the logits", "type": "internal_error", "param": None, "code": "request_failed"}
    assert last == {"error": error}
    assert chunks
    assert not any(choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])


def test_an_error_comes_behind_what_waits_for_its_turn(server):
    server.play = lambda request: Script(token_ids=[70, 71], error="NaN in the logits")
    body = {"prompt": "abc" * 100, "stream": True, "echo": True, "logprobs": 2}
    first, *_, last = frames(server.post("/v1/completions", body))
    assert first["choices"][0]["text"].startswith("abc" * 100)
    assert last["error"]["message"] == "NaN in the logits"
    wait_until(lambda: server.client.num_running == 0)


def test_one_failed_prompt_ends_the_others(server):
    server.play = lambda request: Script(
        token_ids=[70],
        error="NaN" if request.prompt_token_ids[-1] == 70 else None,
        hangs=request.prompt_token_ids[-1] != 70,
    )
    bad = server.tokenizer.decode([70])
    assert server.post("/v1/completions", {"prompt": ["x", bad, "y"]}).status_code == 500
    wait_until(lambda: server.client.num_running == 0)


def hanging(request):
    return Script(token_ids=[70, 71], hangs=True)


@pytest.mark.parametrize(
    ("path", "more"),
    [("/v1/completions", {}), ("/v1/completions", {"echo": True, "logprobs": 2}), ("/v1/chat/completions", {})],
)
def test_a_client_that_leaves_a_stream_aborts_its_request(server, path, more):
    server.play = hanging
    body = {"prompt": ["a", "b"], "messages": [USER], "n": 2, "stream": True} | more
    with httpx.stream("POST", server.url + path, json=body, timeout=PATIENCE, verify=False) as response:
        lines = response.iter_lines()  # kept: with this iterator the connection would go
        assert next(lines).startswith("data: ")
        assert server.client.num_running > 0
    wait_until(lambda: server.client.num_running == 0)
    assert sorted(server.client.aborted) == sorted(request.request_id for request in server.client.submitted)
    wait_until(lambda: server.server.state.life.num_inside == 0)


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_client_that_leaves_while_it_waits_aborts_its_request(server, is_stream, num_tokens):
    server.play = lambda request: Script(token_ids=[70] * num_tokens, hangs=True)
    num_before = server.client.num_output_tokens
    with server.connection() as connection:
        connection.sendall(raw_post("/v1/completions", {"prompt": "a", "stream": is_stream}))
        # Not finished without the stream; with it, nothing at all or nothing more is sent.
        wait_until(lambda: server.client.num_running == 1)
        wait_until(lambda: server.client.num_output_tokens == num_before + num_tokens)
    wait_until(lambda: server.client.num_running == 0)
    assert len(server.client.aborted) == 1


def test_a_client_that_stops_reading_holds_up_nobody(tokenizer):
    def play(request):
        return Script(token_ids=itertools.repeat(70, 400), tokens_per_step=1)

    with running(tokenizer, client_options={"max_model_len": 512}) as server:
        server.play = play
        with server.connection() as stuck:
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            stuck.sendall(raw_post("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 400}))
            wait_until(lambda: server.client.num_output_tokens > 100)
            answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 5})
            assert answer.json()["usage"]["completion_tokens"] == 5


def test_a_client_that_reads_too_slowly_loses_its_stream(tokenizer, monkeypatch):
    monkeypatch.setattr("jaxserve.server.wire.streaming.MAX_HELD_BYTES", 2**16)
    num_tokens = 2000  # 2 MB with their logprobs
    with running(tokenizer, client_options={"max_model_len": 2**16}) as server, socket.socket() as stuck:
        server.play = lambda request: Script(token_ids=[70] * num_tokens, tokens_per_step=100, hangs=True)
        server.client.pause = lambda: server.get("/live")  # a frame a step: the server is as fast as its engine
        server.server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the kernel keeps little
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(server.server.address)
        stuck.sendall(
            raw_post("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 2 * num_tokens, "logprobs": 20})
        )
        wait_until(lambda: bool(server.client.aborted))
        assert server.client.num_running == 0
        assert server.server.state.life.num_inside == 1, "the error waits for the client"


def test_many_streams_at_once(server):
    results = {}

    def ask(i):
        body = {"prompt": f"{i:03d}", "stream": True, "max_tokens": 30}
        chunks = frames(server.post("/v1/completions", body))
        results[i] = "".join(chunk["choices"][0]["text"] for chunk in chunks)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: f"{i:03d}" * 10 for i in range(32)}
