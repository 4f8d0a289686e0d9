"""Tools and reasoning over HTTP: what scripted models write."""

import contextlib
import json

import pytest
from serving import assert_error, frames, running
from tool_cases import CHAT, TOOLS, USER, functions, join, without_ids

from jaxserve.answers.choosing.choice import FROM_CHECKPOINT
from jaxserve.answers.syntaxes.table import TOOL_PARSERS
from jaxserve.answers.syntaxes.thought_table import REASONING_PARSERS
from jaxserve.config import ServerConfig
from jaxserve.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(random_model):
    return Tokenizer.load(random_model)


@pytest.fixture
def serve(tokenizer):
    """Start a server over a scripted engine, which says `text`; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def serve(text, **config):
            server = stack.enter_context(running(tokenizer, client_options={"max_model_len": 2048}, **config))
            server.says(text)
            return server

        yield serve


def ask(server, **fields):
    """Return the message and the finish reason, which must be the same in a stream."""
    body = {"messages": [USER], **fields}
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    message, finish_reason = choice["message"], choice["finish_reason"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = frames(server.post(CHAT, body | options))
    assert join(events) == (without_ids(message), finish_reason)
    assert last["usage"] == answer.json()["usage"]
    num_thoughts = last["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert (num_thoughts > 0) == ("reasoning" in message)
    assert num_thoughts < last["usage"]["completion_tokens"]
    return message, finish_reason


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
WEATHER = {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 2}'}


def test_a_call(serve):
    message, finish_reason = ask(serve(CALL, tool_call_parser="hermes"), tools=TOOLS)
    assert finish_reason == "tool_calls"
    assert message["content"] is None
    assert functions(message) == [WEATHER]
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert "reasoning" not in message


def test_words_and_two_calls(serve):
    server = serve(f"Let me see.\n{CALL}\n{NOW}", tool_call_parser="hermes")
    message, finish_reason = ask(server, tools=TOOLS)
    assert message["content"] == "Let me see."
    assert functions(message) == [WEATHER, {"name": "now", "arguments": "{}"}]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    message, finish_reason = ask(server, tools=TOOLS, parallel_tool_calls=False)
    assert functions(message) == [WEATHER]
    assert finish_reason == "tool_calls"


def test_without_tools_a_call_is_text(serve):
    server = serve(CALL, tool_call_parser="hermes")
    for fields in ({}, {"tools": [], "tool_choice": "none"}, {"tools": []}):
        message, finish_reason = ask(server, **fields)
        assert message["content"] == CALL
        assert "tool_calls" not in message
        assert finish_reason == "stop"


NOT_ALLOWED = {
    "hermes": f"Well.\n{CALL}\n{NOW}",
    "mistral": 'Well.[TOOL_CALLS] [{"name": "now", "arguments": {}}]',
    "llama3_json": '{"name": "now", "parameters": {}}',
    "qwen3_coder": "Well.\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "pythonic": "[now()]",
    "gpt_oss": "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
}


@pytest.mark.parametrize("syntax", NOT_ALLOWED)
def test_a_call_that_is_not_allowed_is_hidden(serve, syntax):
    text = NOT_ALLOWED[syntax]
    server = serve(text, tool_call_parser=syntax)
    message, finish_reason = ask(server, tools=TOOLS, tool_choice="none")
    assert message["content"] == ("Well." if text.startswith("W") else "")
    assert "tool_calls" not in message
    assert finish_reason == "stop"
    others = [{"type": "function", "function": {"name": "get_weather"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": others}}
    message, finish_reason = ask(server, tools=TOOLS, tool_choice=choice)
    assert ("tool_calls" in message) == (syntax == "hermes")
    if syntax == "hermes":
        assert functions(message) == [WEATHER]
    assert "now" not in (message["content"] or "")


def test_a_call_that_is_not_allowed_is_hidden_in_all_routes(serve):
    server = serve(f"Well.\n{CALL}", tool_call_parser="hermes")
    (function, *_) = [tool["function"] for tool in TOOLS if tool["function"]["name"] == "get_weather"]
    bodies = {
        "/v1/responses": {"input": "hello", "tools": [{"type": "function", **function}], "tool_choice": "none"},
        "/v1/messages": {
            "messages": [USER],
            "max_tokens": 200,
            "tools": [{"name": function["name"], "input_schema": function["parameters"]}],
            "tool_choice": {"type": "none"},
        },
    }
    for path, body in bodies.items():
        answer = server.post(path, body)
        assert answer.status_code == 200, answer.text
        items = answer.json()["output"] if path == "/v1/responses" else answer.json()["content"]
        texts = [part["text"] for item in items for part in item.get("content", [item])]
        assert texts == ["Well."]
        lines = server.post(path, body | {"stream": True}).text.splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        deltas = [event["delta"] for event in events if event["type"].endswith(("text.delta", "block_delta"))]
        assert "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas) == "Well."


@pytest.mark.parametrize("tokens_per_step", [1, 60, 500])
def test_items_and_blocks_are_in_the_answer_s_order_however_many_tokens_a_step_has(serve, tokens_per_step):
    server = serve("", tool_call_parser="hermes", reasoning_parser="qwen3")
    server.says(f"<think>Hm.</think>Well.\n{CALL}\nThen.\n{NOW}\nDone.", tokens_per_step=tokens_per_step)
    function = TOOLS[0]["function"]
    tools = [{"name": tool["function"]["name"], "input_schema": function["parameters"]} for tool in TOOLS]
    answer = server.post("/v1/messages", {"messages": [USER], "max_tokens": 400, "tools": tools})
    kinds = {"thinking": "thinking", "text": "text", "tool_use": "input"}
    blocks = [block[kinds[block["type"]]] for block in answer.json()["content"]]
    texts = [block.strip() if isinstance(block, str) else block for block in blocks]
    assert texts == ["Hm.", "Well.", {"city": "Oslo", "days": 2}, "Then.", {}, "Done."]
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    items = server.post("/v1/responses", {"input": "hello", "tools": tools}).json()["output"]
    texts = [item["arguments"] if "arguments" in item else item["content"][0]["text"].strip() for item in items]
    assert texts == ["Hm.", "Well.", '{"city": "Oslo", "days": 2}', "Then.", "{}", "Done."]
    assert [item.get("name") for item in items] == [None, None, "get_weather", None, "now", None]


def test_ordinary_words_beside_tools(serve):
    message, finish_reason = ask(serve("Hello, 1 < 2!", tool_call_parser="hermes"), tools=TOOLS)
    assert message["content"] == "Hello, 1 < 2!"
    assert "tool_calls" not in message
    assert finish_reason == "stop"


def test_a_call_that_is_cut(serve):
    message, finish_reason = ask(serve(CALL, tool_call_parser="hermes"), tools=TOOLS, max_tokens=40)
    assert finish_reason == "length"
    ((name, arguments),) = [call.values() for call in functions(message)]
    assert name == "get_weather"
    assert WEATHER["arguments"].startswith(arguments)


def test_reasoning_and_a_call(serve):
    server = serve(f"Hm,\nso.\n</think>\n\n{CALL}", tool_call_parser="hermes", reasoning_parser="qwen3")
    message, finish_reason = ask(server, tools=TOOLS, chat_template_kwargs={"enable_thinking": True})
    assert message["reasoning"] == message["reasoning_content"] == "Hm,\nso."
    assert message["content"] is None
    assert functions(message) == [WEATHER]
    assert finish_reason == "tool_calls"


@pytest.mark.parametrize("opens", [True, False])
def test_reasoning(serve, opens):
    text = "\nBecause.\n</think>\n\nYes." if opens else "<think>\nBecause.\n</think>\n\nYes."
    message, finish_reason = ask(
        serve(text, reasoning_parser="deepseek_r1"), chat_template_kwargs={"enable_thinking": opens}
    )
    assert (message["reasoning"], message["content"]) == ("Because.", "Yes.")
    assert finish_reason == "stop"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "What does <think> mean?"}],
        [{"role": "system", "content": "<think>"}, USER],
        [{"role": "user", "content": "<think>\n"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b"}, USER],
    ],
)
def test_a_mark_of_thoughts_in_a_message_opens_none(serve, messages):
    server = serve("Yes.", reasoning_parser="qwen3")
    message, _ = ask(server, messages=messages, chat_template_kwargs={"enable_thinking": False})
    assert message["content"] == "Yes."
    assert "reasoning" not in message
    body = {"messages": messages, "chat_template_kwargs": {"enable_thinking": True}}
    server.says("Hm.</think>Yes.")
    message = server.post(CHAT, body).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")


def test_an_assistant_s_message_that_is_continued_opens_thoughts_as_an_answer_does(serve):
    server = serve(" so.</think>Yes.", reasoning_parser="qwen3")
    options = {"continue_final_message": True, "add_generation_prompt": False}
    for prefix, expected in (
        ("<think>Hm,", (" so.", "Yes.")),
        ("<think>", ("so.", "Yes.")),
        ("The tag <think> is", (None, " so.</think>Yes.")),
    ):
        messages = [USER, {"role": "assistant", "content": prefix}]
        message = server.post(CHAT, {"messages": messages, **options}).json()["choices"][0]["message"]
        assert (message.get("reasoning"), message["content"]) == expected


def test_reasoning_that_does_not_end(serve):
    message, _ = ask(serve("<think>I wonder", reasoning_parser="qwen3"))
    assert message["reasoning"] == "I wonder"
    assert message["content"] is None


def test_several_answers(serve):
    server = serve(f"<think>A</think>B{CALL}", tool_call_parser="hermes", reasoning_parser="qwen3")
    answer = server.post(CHAT, {"messages": [USER], "tools": TOOLS, "n": 3}).json()
    assert [without_ids(choice["message"]) for choice in answer["choices"]] == [
        {"content": "B", "reasoning": "A", "reasoning_content": "A", "calls": [WEATHER]}
    ] * 3
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]}) == 3


# What each model writes with special tokens, which are not in the text of other answers.
SPEAKING = {
    "llama3_json": '<|python_tag|>{"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"  # noqa: RUF001
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"  # noqa: RUF001
    "<｜tool▁calls▁end｜>",  # noqa: RUF001
    "gpt_oss": "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
    "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm45": "<tool_call>now\n</tool_call>",
}


@pytest.mark.parametrize("name", SPEAKING)
def test_markers_may_be_special_tokens(serve, tokenizer, name):
    server = serve(SPEAKING[name], tool_call_parser=name)
    message, finish_reason = ask(server, tools=TOOLS)
    assert functions(message) == [{"name": "now", "arguments": "{}"}]
    assert message["content"] is None
    assert finish_reason == "tool_calls"
    assert (len(message["tool_calls"][0]["id"]) == 9) == (name == "mistral")


def test_channels(serve):
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi."
    message, _ = ask(serve(text, reasoning_parser="gpt_oss"))
    assert (message["reasoning"], message["content"]) == ("Hm.", "Hi.")


def test_tools_without_a_known_syntax_are_refused(serve):
    server = serve("x")
    assert_error(server.post(CHAT, {"messages": [USER], "tools": TOOLS}), 400, "tools")
    assert server.post(CHAT, {"messages": [USER], "tools": TOOLS, "tool_choice": "none"}).status_code == 200


def test_the_config_names_the_parsers_that_there_are():
    hints = {field: ServerConfig.__annotations__[field].__args__ for field in ("tool_call_parser", "reasoning_parser")}
    assert hints["tool_call_parser"] == ("auto", "none", *FROM_CHECKPOINT, *TOOL_PARSERS)
    assert hints["reasoning_parser"] == ("auto", "none", *FROM_CHECKPOINT, *REASONING_PARSERS)


def test_a_strict_tool_whose_schema_cannot_be_followed(serve):
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}
    server = serve("x", tool_call_parser="mistral")
    tools = [{"type": "function", "function": function}]
    answer = server.post(CHAT, {"messages": [USER], "tools": tools})
    assert_error(answer, 400, "tools[0].function.parameters")
    assert "not" in answer.json()["error"]["message"]
    assert server.post(CHAT, {"messages": [USER], "tools": tools, "tool_choice": "none"}).status_code == 200


def allowed(*names, mode="auto", route="chat"):
    """tool_choice with these tools, as the route has it."""
    functions = [{"type": "function", **({"function": {"name": n}} if route == "chat" else {"name": n})} for n in names]
    inner = {"mode": mode, "tools": functions}
    return {"type": "allowed_tools", **({"allowed_tools": inner} if route == "chat" else inner)}


class TestAllowedTools:
    """A choice of some of the tools: the model reads of all, and calls no others."""

    @pytest.mark.parametrize(
        ("names", "called"), [(["now"], True), (["get_weather", "now"], True), (["get_weather"], False)]
    )
    def test_only_they_may_be_called(self, serve, names, called):
        server = serve('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', tool_call_parser="hermes")
        body = {"messages": [USER], "tools": TOOLS, "tool_choice": allowed(*names)}
        (choice,) = server.post(CHAT, body).json()["choices"]
        assert bool(choice["message"].get("tool_calls")) == called
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        body = {"input": "hello", "tools": tools, "tool_choice": allowed(*names, route="responses")}
        response = server.post("/v1/responses", body).json()
        assert any(item["type"] == "function_call" for item in response["output"]) == called
        assert response["tool_choice"] == body["tool_choice"]

    @pytest.mark.parametrize(("mode", "is_forced"), [("auto", False), ("required", True)])
    def test_required_means_one_of_them(self, serve, mode, is_forced):
        server = serve("x", tool_call_parser="hermes")
        server.post(CHAT, {"messages": [USER], "tools": TOOLS, "tool_choice": allowed("now", mode=mode)})
        grammar = server.client.submitted[0].grammar
        assert ("now" in grammar) == is_forced
        assert "get_weather" not in grammar

    @pytest.mark.parametrize(
        ("choice", "param"),
        [
            (allowed("nobody"), "tool_choice"),
            (allowed(), "tool_choice.allowed_tools.tools"),
            (allowed("now", mode="sometimes"), "tool_choice.allowed_tools.mode"),
            ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
            ({"type": "function"}, "tool_choice.function"),
            ({"type": "allowed_tools", "function": {"name": "now"}}, "tool_choice.function"),
        ],
        ids=str,
    )
    def test_refused(self, serve, choice, param):
        server = serve("x", tool_call_parser="hermes")
        assert_error(server.post(CHAT, {"messages": [USER], "tools": TOOLS, "tool_choice": choice}), 400, param)
