"""Anthropic's Messages API: the real client against scripted and random models."""

import json

import anthropic
import jsonschema
import pytest
from depths import quick_first
from fake_client import Script
from serving import Running, running
from waiting import PATIENCE

from jaxserve.config import ServerConfig
from jaxserve.engine.frontend import Frontend
from jaxserve.tokenizer import Tokenizer

USER = {"role": "user", "content": "hello"}
MESSAGES = "/v1/messages"
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'


def client(server):
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE)


@pytest.fixture
def server(tokenizer):
    with running(tokenizer, tool_call_parser="hermes", reasoning_parser="qwen3") as server:
        yield server


def ask(server, **fields):
    return client(server).messages.create(**({"model": "fake", "max_tokens": 200, "messages": [USER]} | fields))


def test_an_answer_with_the_anthropic_client(server):
    server.says("Good day.")
    answer = ask(server, system="Be brief.", extra_body={"temperature": 0.5, "top_k": 5}, metadata={"user_id": "u"})
    assert (answer.type, answer.role, answer.model, answer.stop_reason) == ("message", "assistant", "fake", "end_turn")
    assert [block.text for block in answer.content] == ["Good day."]
    assert answer.usage.output_tokens == len(server.tokenizer.encode("Good day.", add_special_tokens=False))
    assert "Be brief." in server.tokenizer.decode(server.client.submitted[-1].prompt_token_ids)


@pytest.mark.parametrize("streams", [False, True])
def test_thoughts_text_and_calls_are_blocks(server, streams):
    server.says(f"<think>Where?</think>I look.\n{CALL}\n{CALL.replace('Oslo', 'Bergen')}")
    options = {"tools": [WEATHER], "messages": [USER], "model": "fake", "max_tokens": 400}
    if streams:
        with client(server).messages.stream(**options) as stream:
            kinds = [event.type for event in stream]
            answer = stream.get_final_message()
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
    else:
        answer = ask(server, **options)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer.content[0].thinking == "Where?"
    assert answer.content[1].text.strip() == "I look."
    assert [block.input for block in answer.content[2:]] == [
        {"city": "Oslo", "days": 2},
        {"city": "Bergen", "days": 2},
    ]
    assert answer.content[2].id != answer.content[3].id
    assert answer.stop_reason == "tool_use"


def test_a_turn_with_results_of_tools_goes_back(server):
    server.says(f"<think>Where?</think>{CALL}")
    first = ask(server, tools=[WEATHER])
    (call,) = [block for block in first.content if block.type == "tool_use"]
    server.says("It rains.")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    turns = [
        USER,
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    assert ask(server, tools=[WEATHER], messages=turns).content[0].text == "It rains."
    prompt = server.tokenizer.decode(server.client.submitted[-1].prompt_token_ids)
    assert prompt.index("rain") < prompt.index("And now?")


def test_why_an_answer_ends(server):
    server.says("one two STOP three")
    answer = ask(server, stop_sequences=["STOP"])
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("one two ", "stop_sequence", "STOP")
    assert ask(server, max_tokens=2).stop_reason == "max_tokens"


def test_thoughts_may_be_limited_or_turned_off(server):
    server.says("Hello.")
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}):
        assert ask(server, thinking=thinking).content[-1].text == "Hello."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [USER, {"role": "user", "content": [{"type": "text"}]}]}, "messages[1].content[0].text"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "bad name", "input_schema": {"type": "object"}}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)
def test_bad_requests_name_the_field_that_was_sent(server, fields, param):
    answer = server.post(MESSAGES, {"model": "fake", "max_tokens": 10, "messages": [USER]} | fields)
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert (body["error"].get("param") or "").startswith(param), body
    assert body["request_id"] == answer.headers["x-request-id"]


def test_errors_have_anthropics_classes(server):
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        ask(server, model="claude-nothing")
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        ask(server, extra_body={"temperature": -1})


def test_a_stream_that_fails_ends_with_an_error(server):
    token_ids = server.tokenizer.encode("one two three", add_special_tokens=False)
    server.play = lambda request: Script(token_ids=token_ids, error="broken")
    body = {"model": "fake", "max_tokens": 50, "messages": [USER], "stream": True}
    text = server.stream(MESSAGES, body).text
    assert "event: message_start" in text
    assert text.rstrip().splitlines()[-2] == "event: error"
    assert json.loads(text.rstrip().splitlines()[-1].removeprefix("data: "))["type"] == "error"


def test_tokens_are_counted_as_they_are_read(server):
    server.says("x")
    for fields in ({}, {"system": "Be brief."}, {"tools": [WEATHER]}):
        counted = client(server).messages.count_tokens(model="fake", messages=[USER], **fields).input_tokens
        usage = ask(server, **fields).usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_keys_as_anthropics_clients_send_them(tokenizer):
    with running(tokenizer, api_key=("secret",)) as server:
        good = anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0, timeout=PATIENCE)
        assert good.messages.create(model="fake", max_tokens=5, messages=[USER]).type == "message"
        with pytest.raises(anthropic.AuthenticationError):
            client(server).messages.create(model="fake", max_tokens=5, messages=[USER])


@pytest.mark.parametrize("choice", quick_first([{"type": "any"}, {"type": "tool", "name": "get_weather"}]))
def test_a_forced_call_follows_its_schema(random_engine, random_model, choice):
    tokenizer = Tokenizer.load(random_model)
    likely = {token: 4.0 for text in ['"', "}", '"}', ",", "<|end|>"] for token in tokenizer.encode(text)}
    frontend = Frontend(random_engine, tokenizer, seed=0, default_sampling={"logit_bias": likely})
    server = Running(frontend, ServerConfig(port=0, tool_call_parser="hermes", served_model_name="fake"))
    server.start()
    try:
        answer = ask(server, tools=[WEATHER], tool_choice=choice, max_tokens=400)
    finally:
        server.server.stop()
    (call,) = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "get_weather", "tool_use")
    jsonschema.validate(call.input, WEATHER["input_schema"])
