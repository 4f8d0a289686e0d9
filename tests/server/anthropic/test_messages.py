"""Anthropic's Messages API: the real client against scripted and random models."""

import json

import anthropic
import jsonschema
import pytest
from depths import quick_first
from fake_client import Script
from serving import running, serving
from waiting import PATIENCE

from jaxserve.engine.frontend import Frontend
from jaxserve.tokenizer import Tokenizer

USER = {"role": "user", "content": "hello"}
BODY = {"model": "fake", "max_tokens": 100, "messages": [USER]}
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
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
EDIT = "context_management.edits[0]"
EDIT_TURNS, EDIT_USES = {"type": "clear_thinking_20251015"}, {"type": "clear_tool_uses_20250919"}
TOOL_USE = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
DOCUMENT = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
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
    assert "Be brief." in server.prompt()
    assert answer._request_id


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
    assert [block.input for block in answer.content[2:]] == [{"city": "Oslo", "days": 2}, {"city": "Bergen", "days": 2}]
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
    prompt = server.prompt()
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


def nested(depth):
    block = {"type": "text", "text": "x"}
    for _ in range(depth):
        block = {"type": "search_result", "title": "", "source": "", "content": [block]}
    return block


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [USER, {"role": "user", "content": [{"type": "text"}]}]}, "messages[1].content[0].text"),
        ({"messages": [USER | {"content": [{"type": ["text"]}]}]}, "messages[0].content[0].type"),
        ({"messages": [USER, USER | {"role": "assistant", "content": [{"type": {}}]}]}, "messages[1].content[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "bad name", "input_schema": {"type": "object"}}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "container_1"}, "container"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"tools": [WEATHER, {"type": "teleport_20300101", "name": "t"}]}, "tools[1].type"),
        ({"tools": [WEATHER, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tools[1].type"),
        ({"tools": [SEARCH, WEATHER | {"name": "bad name"}]}, "tools[1].name"),
        ({"tools": [SEARCH, WEATHER | {"name": None}]}, "tools[1].name"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": 2}]}}, f"{EDIT}.keep"),
        ({"context_management": {"edits": [EDIT_TURNS | {"keep": {"type": "thinking_turns", "value": 0}}]}}, EDIT),
        ({"context_management": {"edits": [EDIT_TURNS | {"keep": {"type": "thinking_turns"}}]}}, EDIT),
        ({"context_management": {"edits": [EDIT_USES | {"keep": {"type": "tool_uses", "value": -1}}]}}, EDIT),
        ({"context_management": {"edits": [EDIT_USES | {"trigger": {"type": "days", "value": 1}}]}}, EDIT),
        ({"context_management": {"edits": [{}]}}, f"{EDIT}.type"),
        ({"context_management": {"edits": [EDIT_TURNS] * 17}}, "context_management.edits"),
        ({"messages": [USER, {"role": "assistant", "content": [TOOL_USE]}]}, "messages[1]"),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}]}]},
            "messages[1]",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [USER | {"content": [nested(600)]}]}, ""),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [TOOL_USE | {"id": 5}], "clear_at": "next_user_message"},
                    USER,
                ]
            },
            "messages[0].content[0].id",
        ),
        ({"messages": [{"role": "user", "content": [DOCUMENT]}]}, "messages[0].content[0].type"),
        ({"output_format": {"type": "json_schema", "schema": {"$ref": "http://127.0.0.1/x"}}}, "output_format.schema"),
    ],
)
def test_bad_requests_name_the_field_that_was_sent(server, fields, param):
    answer = server.post(MESSAGES, {"model": "fake", "max_tokens": 10, "messages": [USER]} | fields)
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert (body["error"].get("param") or "").startswith(param), body
    assert body["request_id"] == answer.headers["x-request-id"] == answer.headers["request-id"]


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


def test_words_before_and_after_thoughts_are_lines_of_one_turn(server):
    blocks = [
        {"type": "text", "text": "Let me"},
        {"type": "text", "text": " see."},
        {"type": "thinking", "thinking": "Hm", "signature": ""},
        {"type": "text", "text": "Yes."},
        {"type": "thinking", "thinking": "Done", "signature": ""},
        {"type": "text", "text": ""},
    ]
    ask(server, messages=[USER, {"role": "assistant", "content": blocks}, USER])
    assert "assistant\nLet me see.\nYes.<|im_end|>" in server.prompt()


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
    with serving(frontend, tool_call_parser="hermes", served_model_name="fake") as server:
        answer = ask(server, tools=[WEATHER], tool_choice=choice, max_tokens=400)
    (call,) = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "get_weather", "tool_use")
    jsonschema.validate(call.input, WEATHER["input_schema"])


@pytest.mark.parametrize(
    "content", ["The answer is (", [{"type": "text", "text": "The answer "}, {"type": "text", "text": "is ("}]], ids=str
)
def test_an_assistants_message_is_continued(server, content):
    server.says("A)")
    messages = [USER, {"role": "assistant", "content": content}]
    answer = ask(server, messages=messages)
    assert [block.text for block in answer.content] == ["A)"]
    assert server.prompt().endswith("The answer is (")
    counted = client(server).messages.count_tokens(model="fake", messages=messages).input_tokens
    assert counted == answer.usage.input_tokens


@pytest.mark.parametrize("streams", [False, True])
def test_thoughts_that_the_client_does_not_want_to_see(server, streams):
    server.says("<think>secret</think>Hello.")
    thinking = {"type": "adaptive", "display": "omitted"}
    answer = server.post(MESSAGES, BODY | {"thinking": thinking, "stream": streams})
    assert '"thinking"' in answer.text
    assert "secret" not in answer.text
    if not streams:
        assert [block["type"] for block in answer.json()["content"]] == ["thinking", "text"]
        assert answer.json()["usage"]["output_tokens_details"]["thinking_tokens"] > 0


@pytest.mark.parametrize("streams", [False, True])
def test_what_is_read_from_and_written_to_the_cache(server, streams):
    token_ids = server.tokenizer.encode("Hello.", add_special_tokens=False)
    server.play = lambda request: Script(token_ids=token_ids, num_cached_tokens=16)
    text = [{"type": "text", "text": "x" * 100, "cache_control": {"type": "ephemeral"}}]
    for content, has_marks in ((text, True), ("x" * 100, False)):
        body = BODY | {"messages": [{"role": "user", "content": content}], "stream": streams}
        answer = server.post(MESSAGES, body)
        usages = (
            [answer.json()["usage"]]
            if not streams
            else [
                event.get("usage") or event["message"]["usage"]
                for line in answer.text.splitlines()
                if line.startswith("data: ")
                for event in [json.loads(line.removeprefix("data: "))]
                if event["type"] in ("message_start", "message_delta")
            ]
        )
        num_prompt_tokens = len(server.client.submitted[-1].prompt_token_ids)
        written = num_prompt_tokens // 16 * 16 - 16 if has_marks else 0
        for usage in usages:
            assert usage["cache_read_input_tokens"] == 16
            assert usage["cache_creation_input_tokens"] == written
            assert usage["input_tokens"] == num_prompt_tokens - 16 - written
        assert len(usages) == 1 + streams


def test_lengths_in_the_words_that_claude_code_knows(server):
    """It compacts a conversation that is too long, and asks for fewer tokens if that is enough."""
    num_tokens = len(server.tokenizer.encode("x", add_special_tokens=False)) * 600
    answer = server.post(MESSAGES, BODY | {"messages": [{"role": "user", "content": "x" * num_tokens}]})
    assert answer.status_code == 400
    assert "prompt is too long: " in answer.json()["error"]["message"]
    answer = server.post(MESSAGES, BODY | {"max_tokens": 32000})
    num_prompt_tokens = server.post(f"{MESSAGES}/count_tokens", BODY).json()["input_tokens"]
    known = f"input length and `max_tokens` exceed context limit: {num_prompt_tokens} + 32000 > 512, decrease"
    assert known in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "max_tokens"


def test_models_as_anthropics_and_openais_clients_read_them(server):
    (model,) = client(server).models.list().data
    assert (model.type, model.id, model.display_name) == ("model", "fake", "fake")
    assert abs(model.created_at.timestamp() - server.server.state.model.created) < 1
    assert client(server).models.retrieve("fake").max_input_tokens == 512
    listed = server.get("/v1/models").json()
    assert (listed["object"], listed["has_more"], listed["first_id"]) == ("list", False, "fake")
    assert listed["data"][0]["object"] == "model"


SYSTEM_LATE = {"role": "system", "content": "late rule", "clear_at": "next_user_message"}


@pytest.mark.parametrize(
    ("messages", "is_read"),
    [([USER, SYSTEM_LATE], True), ([USER, SYSTEM_LATE, {"role": "assistant", "content": "a"}, USER], False)],
)
def test_a_system_message_that_lasts_until_the_user_speaks(server, messages, is_read):
    assert server.post(MESSAGES, BODY | {"messages": messages}).status_code == 200
    prompt = server.prompt()
    assert ("late rule" in prompt) is is_read


@pytest.mark.parametrize(
    ("change", "offered"),
    [
        ([], ["get_weather"]),
        ([{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "later"}}], ["get_weather", "later"]),
        (
            [{"type": "tool_addition", "tool": {"type": "tool_definition", "definition": WEATHER | {"name": "new"}}}],
            ["get_weather", "new"],
        ),
        ([{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "get_weather"}}], ["later"]),
        (
            [
                {"type": kind, "tool": {"type": "tool_reference", "name": "get_weather"}}
                for kind in ("tool_removal", "tool_addition")
            ],
            ["get_weather"],
        ),
        ([{"type": "tool_addition", "tool": {"type": "tool_definition", "definition": WEATHER}}], ["get_weather"]),
    ],
    ids=str,
)
def test_tools_that_come_and_go(tokenizer, change, offered):
    template = "{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}"
    with running(tokenizer.with_chat_template(template), tool_call_parser="hermes") as server:
        messages = [USER, *([{"role": "system", "content": change}] if change else [])]
        tools = [WEATHER, WEATHER | {"name": "later", "defer_loading": True}]
        answer = server.post(MESSAGES, BODY | {"messages": messages, "tools": tools})
        assert answer.status_code == 200, answer.text
        prompt = server.prompt()
        assert prompt == "".join(f"({name})" for name in offered)
        if not change:  # whatever can be called is offered if nothing can find it
            hosted = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
            for given in ([hosted, *tools], tools[1:]):
                assert server.post(MESSAGES, BODY | {"tools": given}).status_code == 200
                prompt = server.prompt()
                assert "(later)" in prompt


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER, {"role": "user", "content": "again"}], "user\nhello\nagain\nassistant\n"),
        (
            [USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, USER],
            "user\nhello\nassistant\nab\nuser\nhello\nassistant\n",
        ),
        (
            [USER, {"role": "assistant", "content": [TOOL_USE]}, {"role": "user", "content": [RESULT]}, USER],
            "user\nhello\nassistant\n\ntool\nrain\nuser\nhello\nassistant\n",
        ),
    ],
    ids=str,
)
def test_messages_of_one_role_are_one_turn(server, messages, expected):
    assert server.post(MESSAGES, BODY | {"messages": messages}).status_code == 200
    assert server.prompt(skip_special_tokens=True) == expected


def test_a_beta_stream_with_the_anthropic_client(server):
    server.says("Done.")
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain " * 20}
    messages = [USER, {"role": "assistant", "content": [TOOL_USE]}, {"role": "user", "content": [result]}]
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 0}}
    edit["keep"] = {"type": "tool_uses", "value": 0}
    with client(server).beta.messages.stream(
        model="fake",
        max_tokens=100,
        messages=messages,
        betas=["context-management-2025-06-27"],
        context_management={"edits": [edit]},
    ) as stream:
        answer = stream.get_final_message()
    assert answer.content[0].text == "Done."
    (applied,) = answer.context_management.applied_edits
    assert (applied.type, applied.cleared_tool_uses) == ("clear_tool_uses_20250919", 1)
    assert answer.usage.input_tokens > 0
    assert stream.request_id
