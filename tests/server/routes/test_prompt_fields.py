"""Fields that decide which prompt is read, and what of an answer is shown, on every route that has them."""

import json

import pytest
from fake_client import Script
from serving import BOS, assert_error, frames, response_events, running

from jaxserve.tokenizer import Tokenizer

USER = {"role": "user", "content": "hello"}
GENERATION = {
    "completions": ("/v1/completions", {"prompt": "abcdef", "max_tokens": 4}),
    "chat": ("/v1/chat/completions", {"messages": [USER], "max_tokens": 4}),
    "responses": ("/v1/responses", {"input": "hello", "max_output_tokens": 4}),
}
READING = GENERATION | {"embeddings": ("/v1/embeddings", {"input": "abcdef"})}
CONVERSATIONS = {route: GENERATION[route] for route in ("chat", "responses")} | {
    "tokenize": ("/tokenize", {"messages": [USER]})
}


def read(server, route, fields, bodies=READING):
    """Return the token ids that are read for a request with these fields."""
    path, body = bodies[route]
    server.client.submitted.clear()
    answer = server.post(path, body | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"] if route == "tokenize" else list(server.client.submitted[0].prompt_token_ids)


def text_read(server, route, fields):
    return server.tokenizer.decode(read(server, route, fields, CONVERSATIONS), skip_special_tokens=False)


@pytest.mark.parametrize("route", READING)
def test_truncation_side(server, route):
    whole = read(server, route, {})
    begins = [BOS] if route in ("completions", "embeddings") else []  # the tokenizer's, which is never cut off
    end = begins + whole[len(begins) - 5 :]
    for side, kept in ((None, end), ("left", end), ("right", whole[:5])):
        assert read(server, route, {"truncate_prompt_tokens": 5, "truncation_side": side}) == kept
    assert read(server, route, {"truncation_side": "right"}) == whole


@pytest.mark.parametrize("route", READING)
@pytest.mark.parametrize("length", [513, 10**6])
def test_truncation_beyond_the_context_is_refused(server, route, length):
    path, body = READING[route]
    answer = server.post(path, body | {"truncate_prompt_tokens": length})
    assert_error(answer, 400, "truncate_prompt_tokens")
    assert "512" in answer.json()["error"]["message"]


@pytest.mark.parametrize("route", READING)
def test_add_special_tokens(server, route):
    """A text begins with BOS unless that is declined; a template writes its own, and the tokenizer's are added if
    requested.
    """
    default = read(server, route, {})
    without, with_them = (read(server, route, {"add_special_tokens": value}) for value in (False, True))
    assert default == (with_them if route in ("completions", "embeddings") else without)
    assert with_them == [BOS, *without]


@pytest.mark.parametrize("skips", [None, True, False])
@pytest.mark.parametrize("route", ["completions", "chat"])
def test_a_special_token_is_a_stop_string(server, route, skips):
    """It stops the answer, even if the text does not show it."""
    server.says("ab<|im_start|>cd")
    path, body = GENERATION[route]
    fields = {"stop": ["<|im_start|>"], "max_tokens": 9, "skip_special_tokens": skips}
    choice = server.post(path, body | fields).json()["choices"][0]
    assert (choice["text"] if route == "completions" else choice["message"]["content"]) == "ab"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "<|im_start|>")


@pytest.mark.parametrize("route", CONVERSATIONS)
@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, False),
        ({"reasoning_effort": "none"}, False),
        *(({"reasoning_effort": effort}, True) for effort in ("minimal", "low", "medium", "high", "xhigh", "max")),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"effort": "max"}}, True),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "low"}, True),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_effort_turns_thinking_on_and_off(server, route, fields, thinks):
    assert ("THINK" in text_read(server, route, fields)) == thinks


@pytest.fixture(scope="module")
def variables(tokenizer):
    """A server whose template shows its variables."""
    template = "{{ [messages[0].content, persona, documents, reasoning_effort, verbosity] | tojson }}"
    with running(tokenizer.with_chat_template(template)) as server:
        yield server


@pytest.mark.parametrize("route", CONVERSATIONS)
def test_variables_of_the_template(variables, route):
    fields = {
        "chat_template_kwargs": {"persona": {"name": "Ada", "tags": ["a", 1, None, 0.5, True]}},
        "documents": [{"title": "t", "text": "x"}],
        "reasoning_effort": "max",
        **({"text": {"verbosity": "low"}} if route == "responses" else {"verbosity": "low"}),
    }
    content, persona, documents, effort, verbosity = json.loads(text_read(variables, route, fields))
    assert content == "hello"
    assert persona == fields["chat_template_kwargs"]["persona"]
    assert documents == fields["documents"]
    assert (effort, verbosity) == ("max", "low")


@pytest.fixture(scope="module")
def thinking(tokenizer: Tokenizer):
    """A server whose model thinks before it answers."""
    with running(tokenizer, reasoning_parser="qwen3") as server:
        server.says("<think>hm hm</think>yes")
        yield server


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("shows", [None, True, False])
def test_thoughts_of_a_chat_are_shown_or_only_counted(thinking, shows, n):
    body = {"messages": [USER], "include_reasoning": shows, "n": n}
    answer = thinking.post("/v1/chat/completions", body).json()
    streamed = frames(
        thinking.post("/v1/chat/completions", body | {"stream": True, "stream_options": {"include_usage": True}})
    )
    choices = [choice for chunk in streamed for choice in chunk["choices"]]
    deltas = [choice["delta"] for choice in sorted(choices, key=lambda choice: choice["index"])]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["yes"] * n
    assert "".join(delta.get("content") or "" for delta in deltas) == "yes" * n
    for usage in (answer["usage"], streamed[-1]["usage"]):
        assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
    told = [choice["message"].get("reasoning") for choice in answer["choices"]]
    told_in_pieces = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    if shows is False:
        assert told == [None] * n
        assert told_in_pieces == ""
        assert "hm" not in json.dumps([answer, streamed])
    else:
        assert told == ["hm hm"] * n
        assert told_in_pieces == "hm hm" * n


@pytest.mark.parametrize("shows", [None, False])
def test_thoughts_of_a_response(thinking, shows):
    body = {"input": "hello", "include_reasoning": shows}
    answer = thinking.post("/v1/responses", body).json()
    kinds = ["message"] if shows is False else ["reasoning", "message"]
    assert [item["type"] for item in answer["output"]] == kinds
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    events = response_events(thinking.post("/v1/responses", body | {"stream": True}))
    assert any("reasoning" in event["type"] for event in events) == (shows is not False)


@pytest.mark.parametrize(("content", "text"), [("The answer", "The answer"), ([{"type": "text", "text": "A"}], "A")])
def test_a_chat_begins_with_the_message_that_it_continues(server, content, text):
    server.says(" is 42")
    body = {"messages": [USER, {"role": "assistant", "content": content}], "continue_final_message": True}
    for echo, expected in ((True, f"{text} is 42"), (False, " is 42")):
        given = body | {"echo": echo, "n": 2}
        whole = server.post("/v1/chat/completions", given).json()
        assert [choice["message"]["content"] for choice in whole["choices"]] == [expected] * 2
        pieces: dict[int, str] = {}
        for chunk in frames(server.post("/v1/chat/completions", given | {"stream": True})):
            for choice in chunk["choices"]:
                pieces[choice["index"]] = pieces.get(choice["index"], "") + choice["delta"].get("content", "")
        assert pieces == {0: expected, 1: expected}


@pytest.mark.parametrize(("route", "prefix"), [("completions", "cmpl"), ("chat", "chatcmpl"), ("embeddings", "embd")])
def test_the_client_names_its_answer(server, route, prefix):
    path, body = READING[route]
    assert server.post(path, body | {"request_id": "r-1"}).json()["id"] == f"{prefix}-r-1"
    by_header = server.post(path, body, headers={"x-request-id": "h-1"})
    assert by_header.json()["id"] == f"{prefix}-h-1"
    assert by_header.headers["x-request-id"] == "h-1"
    assert server.post(path, body).json()["id"] != server.post(path, body).json()["id"]
    if route != "embeddings":
        chunks = frames(server.post(path, body | {"request_id": "r-2", "stream": True}))
        assert {chunk["id"] for chunk in chunks} == {f"{prefix}-r-2"}


def test_two_answers_of_one_name_do_not_meet(server):
    """The engine's own ids stay apart."""
    for _ in range(2):
        server.post("/v1/completions", {"prompt": "a", "request_id": "same", "max_tokens": 1})
    first, second = server.client.submitted
    assert first.request_id != second.request_id


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_as_ids(server, stream):
    server.play = lambda request: Script(token_ids=[70, 71])
    body = {"prompt": "ab", "logprobs": 1, "echo": True, "return_tokens_as_token_ids": True, "stream": stream}
    answer = server.post("/v1/completions", body)
    choices = [chunk["choices"][0] for chunk in frames(answer)] if stream else answer.json()["choices"]
    tokens = [token for choice in choices for token in (choice["logprobs"] or {"tokens": []})["tokens"]]
    assert tokens[0] == f"token_id:{BOS}"
    assert tokens[-2:] == ["token_id:70", "token_id:71"]
    tops = [top for choice in choices if choice["logprobs"] for top in choice["logprobs"]["top_logprobs"] if top]
    assert all(token.startswith("token_id:") for top in tops for token in top)

    body = {"messages": [USER], "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    answer = server.post("/v1/chat/completions", body | {"stream": stream})
    choices = [chunk["choices"][0] for chunk in frames(answer)] if stream else answer.json()["choices"]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == ["token_id:70", "token_id:71"]
    assert all(top["token"].startswith("token_id:") for entry in entries for top in entry["top_logprobs"])
