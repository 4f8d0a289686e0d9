"""Answers of many log probabilities or vectors: encoded in turns with others, the same to the byte as in one go."""

import asyncio
import threading

import msgspec
import pytest
from depths import quick_first
from serving import assert_well, frames, response_events

from jaxserve.server.routes import utility
from jaxserve.server.wire import body, streaming
from jaxserve.server.wire.body import EncodedList, in_turns, json_response

COMPLETION = {"prompt": ["abc" * 30, "hé"], "n": 2, "max_tokens": 150, "logprobs": 20}
CHAT = {
    "messages": [{"role": "user", "content": "hé" * 50}],
    "n": 2,
    "max_tokens": 150,
    "logprobs": True,
    "top_logprobs": 20,
}


class Answer(msgspec.Struct):
    first: list[int]
    text: str
    others: list[list[str | None]]


def sent(response):
    """Return the messages that a response sends."""
    messages = []

    async def send(message):
        messages.append(message)

    async def receive():
        await asyncio.Event().wait()

    asyncio.run(response({"type": "http"}, receive, send))
    return messages


@pytest.mark.parametrize("length", [0, 1, 3, 100_000])
def test_an_encoded_list_is_that_list(length):
    first, other = list(range(length)), ["é", None]
    numbers, texts = EncodedList(), EncodedList()
    for start in range(0, length + 1, 1000):  # the last one is empty
        numbers.extend(first[start : start + 1000])
    texts.extend(other)
    start, *parts = sent(json_response(Answer(numbers, "x", [texts] * 2)))
    whole = msgspec.json.encode(Answer(first, "x", [other] * 2))
    assert b"".join(part["body"] for part in parts) == whole
    assert dict(start["headers"]) == {b"content-length": b"%d" % len(whole), b"content-type": b"application/json"}
    assert max(len(part["body"]) for part in parts) < 2 * body.AT_ONCE


async def test_others_have_their_turns():
    """Other tasks run once every VALUES_A_TURN values, which are freed by then."""
    num_turns, numbers = 0, list(range(10 * body.VALUES_A_TURN))
    expected = list(numbers)

    async def others():
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    waiting = asyncio.create_task(others())
    found = []
    async for some in in_turns(numbers):
        found += some
        assert len(found) + len(numbers) == len(expected)
        assert num_turns * body.VALUES_A_TURN >= len(found) - body.VALUES_A_TURN
    waiting.cancel()
    assert found == expected
    assert num_turns >= 10


@pytest.mark.parametrize(
    ("path", "asked", "num_encoded"),
    [
        ("/v1/completions", COMPLETION, 4 * 600),  # lists of 4 choices
        ("/v1/completions", COMPLETION | {"echo": True}, 4 * (600 + 2 * (91 + 4))),
        ("/v1/completions", COMPLETION | {"echo": True, "stream": True}, 4 * (600 + 2 * (91 + 4))),
        ("/v1/completions", COMPLETION | {"logprobs": None, "prompt_logprobs": 20}, 91 + 4),  # once for all choices
        ("/v1/chat/completions", CHAT, 300),
        ("/v1/embeddings", {"input": [[5]] * 150}, 150),
    ],
)
def test_long_lists_are_encoded_in_turns(server, monkeypatch, path, asked, num_encoded):
    num_a_turn = body.VECTORS_A_TURN if path == "/v1/embeddings" else body.VALUES_A_TURN
    lengths = []
    extend = EncodedList.extend
    monkeypatch.setattr(EncodedList, "extend", lambda self, values: (lengths.append(len(values)), extend(self, values)))
    assert server.post(path, asked).status_code == 200
    assert sum(lengths) == num_encoded
    assert max(lengths) <= num_a_turn
    assert_well(server)


@pytest.mark.parametrize("more", quick_first([{}, {"echo": True, "return_token_ids": True}]))
def test_a_completion_is_what_its_stream_brings(server, more):
    asked = COMPLETION | more | {"n": 8}
    answer = server.post("/v1/completions", asked)
    assert len(answer.content) > body.AT_ONCE
    found = answer.json()["choices"]
    pieces = [
        choice
        for frame in frames(server.stream("/v1/completions", asked | {"stream": True}))
        for choice in frame["choices"]
    ]
    assert [choice["index"] for choice in found] == list(range(16))
    for choice in found:
        whole, *rest = [piece for piece in pieces if piece["index"] == choice["index"]]
        for piece in rest:
            whole |= {name: whole[name] + piece[name] for name in ("text", "token_ids") if name in whole}
            whole |= {name: piece[name] for name in ("finish_reason", "stop_reason")}
            whole["logprobs"] = {name: values + piece["logprobs"][name] for name, values in whole["logprobs"].items()}
        absent = [name for name in ("prompt_logprobs", "prompt_token_ids") if name not in whole]
        assert choice == whole | dict.fromkeys(absent)  # null in an answer that is not streamed


@pytest.mark.slow
def test_a_stream_of_many_echoes_is_sent_as_it_is_encoded(server, monkeypatch):
    """A reader is not slow only because it gets nothing before everything is encoded."""
    monkeypatch.setattr(streaming, "MAX_HELD_BYTES", 2**20)
    asked = {"prompt": "abc" * 130, "n": 64, "max_tokens": 1, "logprobs": 20, "echo": True, "stream": True}
    answer = server.post("/v1/completions", asked)
    assert len(answer.content) > 4 * streaming.MAX_HELD_BYTES
    assert sum(frame["choices"][0]["text"].startswith("abc" * 130) for frame in frames(answer)) == 64


def test_the_text_of_an_echo_is_decoded_once(server, monkeypatch):
    texts = []
    decode = server.tokenizer.decode

    def counted(*args, **kwargs):
        texts.append(decode(*args, **kwargs))
        return texts[-1]

    monkeypatch.setattr(server.tokenizer, "decode", counted)
    answer = server.post("/v1/completions", {"prompt": [70, 71], "n": 4, "max_tokens": 2, "echo": True})
    (text,) = texts
    continued = text + 2 * server.tokenizer.token_text(71)
    assert [choice["text"] for choice in answer.json()["choices"]] == [continued] * 4


def test_all_choices_have_the_log_probabilities_of_their_prompt(server):
    choices = server.post("/v1/completions", COMPLETION | {"prompt_logprobs": 20}).json()["choices"]
    of_prompts = [choice["prompt_logprobs"] for choice in choices]
    assert [len(entries) for entries in of_prompts] == [91, 91, 4, 4]
    assert of_prompts[0] == of_prompts[1]
    assert of_prompts[2] == of_prompts[3]
    for entries, prompt in ((of_prompts[0], COMPLETION["prompt"][0]), (of_prompts[2], COMPLETION["prompt"][1])):
        assert entries[0] is None
        for entry, token_id in zip(entries[1:], server.tokenizer.encode(prompt)[1:], strict=True):
            assert entry[str(token_id)]["rank"] == 2
            assert len(entry) == 20


def test_a_response_is_what_its_stream_brings(server, monkeypatch):
    """Its log probabilities are encoded as they come; the events after them wait for the reader."""
    lengths, num_drains = [], 0
    extend, drain = EncodedList.extend, streaming._Frames.drain

    async def counted(frames):
        nonlocal num_drains
        num_drains += 1
        await drain(frames)

    monkeypatch.setattr(EncodedList, "extend", lambda self, values: (lengths.append(len(values)), extend(self, values)))
    monkeypatch.setattr(streaming._Frames, "drain", counted)
    asked = {"input": "hi" * 50, "max_output_tokens": 150, "top_logprobs": 20}
    asked["include"] = ["message.output_text.logprobs"]
    *deltas, text, part, item, completed = response_events(server.post("/v1/responses", asked | {"stream": True}))[4:]
    assert sum(lengths) == 150
    assert max(lengths) <= body.VALUES_A_TURN
    assert lengths == [len(delta["logprobs"]) for delta in deltas]
    assert num_drains == 3
    logprobs = [token for delta in deltas for token in delta["logprobs"]]
    assert len(logprobs) == 150
    assert text["logprobs"] == part["part"]["logprobs"] == logprobs
    assert item["item"]["content"] == completed["response"]["output"][0]["content"] == [part["part"]]
    stored = server.get(f"/v1/responses/{completed['response']['id']}")
    assert stored.json() == completed["response"]
    whole = server.post("/v1/responses", asked).json()
    assert whole["output"][0]["content"] == [part["part"]]


def test_a_chat_is_what_its_stream_brings(server):
    answer = server.post("/v1/chat/completions", CHAT | {"prompt_logprobs": 20})
    assert len(answer.content) > body.AT_ONCE
    pieces = [
        choice
        for frame in frames(server.stream("/v1/chat/completions", CHAT | {"stream": True}))
        for choice in frame["choices"]
        if choice["logprobs"]
    ]
    for choice in answer.json()["choices"]:
        content = [
            token for piece in pieces if piece["index"] == choice["index"] for token in piece["logprobs"]["content"]
        ]
        assert choice["logprobs"] == {"content": content, "refusal": None}
        assert len(content) == 150
    of_prompt = answer.json()["prompt_logprobs"]
    assert of_prompt[0] is None
    assert len(of_prompt) == len(server.client.submitted[0].prompt_token_ids)


def test_many_tokens_are_encoded_in_the_thread_that_finds_them(server, monkeypatch):
    """in pieces, between which the event loop has its turn."""
    lengths, threads = [], set()
    extend = EncodedList.extend

    def counted(encoded, values):
        lengths.append(len(values))
        threads.add(threading.current_thread().name)
        extend(encoded, values)

    monkeypatch.setattr(EncodedList, "extend", counted)
    text = "h\u00e9" * utility.VALUES_A_PIECE
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    tokens = server.tokenizer.encode(text)
    assert (answer["count"], answer["tokens"]) == (len(tokens), tokens)
    assert answer["token_strs"] == [server.tokenizer.vocabulary_token(token) for token in tokens]
    assert sum(lengths) == 2 * len(tokens)
    assert max(lengths) == utility.VALUES_A_PIECE
    assert "server" not in threads
