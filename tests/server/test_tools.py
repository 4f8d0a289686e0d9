"""Tools and reasoning over HTTP: what scripted models write, and what a random model is constrained to write."""

import contextlib
import json

import jsonschema
import openai
import pytest
from depths import quick_only
from serving import Running, assert_error, frames, running
from waiting import PATIENCE

from jaxserve.config import ServerConfig
from jaxserve.engine.frontend import Frontend
from jaxserve.server.syntaxes.syntax import Tags
from jaxserve.server.syntaxes.table import TOOL_PARSERS
from jaxserve.server.syntaxes.thought_table import REASONING_PARSERS
from jaxserve.server.syntaxes.tool import Tool
from jaxserve.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/place"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"enum": ["C", "F"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "string"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Look.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"get_weather": PARAMETERS, "now": {"type": "object", "properties": {}}}


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


def without_ids(message):
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning", ""),
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": calls,
    }


def join(events):
    """Join the chunks of a stream to a message."""
    texts = {"content": "", "reasoning": "", "reasoning_content": ""}
    calls, finish_reasons = [], []
    for event in events:
        (choice,) = event["choices"]
        delta = choice["delta"]
        for name in texts:
            texts[name] += delta.get(name) or ""
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                assert piece["index"] == len(calls)
                assert piece["type"] == "function"
                calls.append({"name": piece["function"]["name"], "arguments": ""})
            else:
                assert piece["index"] == len(calls) - 1
                assert "name" not in piece["function"]
            calls[-1]["arguments"] += piece["function"].get("arguments", "")
        finish_reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(finish_reasons) == 1
    return texts | {"calls": calls}, finish_reasons[0]


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
WEATHER = {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 2}'}


def functions(message):
    return [call["function"] for call in message["tool_calls"]]


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
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        message, finish_reason = ask(server, **fields)
        assert message["content"] == CALL
        assert "tool_calls" not in message
        assert finish_reason == "stop"


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
    server = serve("so.</think>Yes.", reasoning_parser="qwen3")
    options = {"continue_final_message": True, "add_generation_prompt": False}
    for prefix, expected in (("<think>Hm,", ("so.", "Yes.")), ("The tag <think> is", (None, "so.</think>Yes."))):
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
    assert hints["tool_call_parser"] == ("auto", "none", *TOOL_PARSERS)
    assert hints["reasoning_parser"] == ("auto", "none", *REASONING_PARSERS)


# One of each way to write a call, and of each kind of marks; `test_syntaxes` has the grammars of all.
FORCED = ["hermes", "llama3_json", "mistral", "deepseek_v3", "gpt_oss", "qwen3_coder", "kimi_k2", "gemma4", "lfm2"]
FORCED += ["pythonic", "glm45", "deepseek_v32"]


@pytest.fixture(scope="module", params=quick_only([*FORCED, "none"], "hermes", "qwen3_coder", "none"))
def forced(request, random_engine, tokenizer):
    """A server for each syntax, over the same engine. Closing marks are made likely, or texts would not end."""
    config = ServerConfig(port=0, tool_call_parser=request.param, served_model_name="tiny")
    bias = dict.fromkeys(['"', "}", '"}', ",", "<|end|>"], 4.0)
    calls = TOOL_PARSERS.get(request.param, TOOL_PARSERS["hermes"])[0]
    if isinstance(calls.arguments, Tags):
        bias |= dict.fromkeys([calls.arguments.value[1], calls.section[1] or calls.call[1]], 7.0)
    defaults = {"logit_bias": {token: value for text, value in bias.items() for token in tokenizer.encode(text)}}
    server = Running(Frontend(random_engine, tokenizer, seed=0, default_sampling=defaults), config)
    server.start()
    yield server
    server.server.stop()
    assert server.wait() == 0


def check_calls(message, names):
    for function in functions(message):
        assert function["name"] in names
        jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])


def test_a_forced_call_cannot_fail(forced):
    body = {"messages": [USER], "tools": TOOLS, "n": 8, "seed": 3, "max_tokens": 400}
    for choice, names in (
        ("required", SCHEMAS),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
        ({"type": "function", "function": {"name": "now"}}, {"now"}),
    ):
        is_named = choice != "required"
        answer = forced.post(CHAT, body | {"tool_choice": choice, "parallel_tool_calls": False})
        assert answer.status_code == 200, answer.text
        answers = answer.json()["choices"]
        finished = [answer for answer in answers if answer["finish_reason"] != "length"]
        assert len(finished) >= 6
        for answer in finished:
            assert answer["finish_reason"] == ("stop" if is_named else "tool_calls")
            assert answer["message"]["content"] is None
            assert len(answer["message"]["tool_calls"]) == 1
            check_calls(answer["message"], names)


def test_forced_calls_in_a_stream(forced):
    body = {"messages": [USER], "tools": TOOLS, "tool_choice": "required", "seed": 5, "max_tokens": 400}
    body["response_format"] = {"type": "json_object"}  # which has nothing to say where a call is forced
    whole = forced.post(CHAT, body).json()["choices"][0]
    streamed = join(frames(forced.post(CHAT, body | {"stream": True})))
    assert streamed == (without_ids(whole["message"]), whole["finish_reason"])
    if whole["finish_reason"] == "tool_calls":
        assert whole["message"]["content"] is None
        check_calls(whole["message"], SCHEMAS)


def test_an_answer_in_a_format_beside_tools(forced):
    """With tool_choice auto an answer is a call, or follows response_format."""
    if forced.server.state.syntax.knows_tools:
        schema = {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        }
        response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"messages": [USER], "tools": TOOLS, "n": 12, "seed": 2, "response_format": response_format}
        choices = forced.post(CHAT, body | {"max_tokens": 400}).json()["choices"]
        assert any(choice["finish_reason"] != "length" for choice in choices)
        for choice in choices:
            if choice["finish_reason"] == "tool_calls":
                check_calls(choice["message"], SCHEMAS)
            elif choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["message"]["content"]), schema)


def test_a_strict_call_that_nothing_forces(forced):
    """Words are free; what begins as a call is one, and follows its schema if the tool is strict."""
    syntax = forced.server.state.syntax
    tools = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
    calls = syntax.calls
    trigger = "<|channel|>" if syntax.has_channels else (calls.section[0] or calls.call[0]).strip()
    token_id = forced.tokenizer.added_token_id(trigger)
    if calls.is_bare or not syntax.knows_tools or token_id is None:
        assert not syntax.forcing.follows_strict([Tool("now", {}, is_strict=True)])
        return
    bias = forced.server.state.frontend.default_sampling["logit_bias"] | {token_id: 6.0}
    body = {"messages": [USER], "tools": tools, "n": 16, "seed": 7, "max_tokens": 300, "logit_bias": bias}
    body["parallel_tool_calls"] = False  # the mark that is likely would begin one call after the other
    answer = forced.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    calls = [choice["message"] for choice in answer.json()["choices"] if choice["finish_reason"] == "tool_calls"]
    assert calls
    for message in calls:
        check_calls(message, SCHEMAS)


def test_a_strict_tool_whose_schema_cannot_be_followed(serve):
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}
    server = serve("x", tool_call_parser="mistral")
    tools = [{"type": "function", "function": function}]
    answer = server.post(CHAT, {"messages": [USER], "tools": tools})
    assert_error(answer, 400, "tools[0].function.parameters")
    assert "not" in answer.json()["error"]["message"]
    assert server.post(CHAT, {"messages": [USER], "tools": tools, "tool_choice": "none"}).status_code == 200


@pytest.mark.parametrize("reasoning_parser", ["deepseek_r1", "qwen3", "gpt_oss", "mistral", "none"])
def test_an_answer_in_a_format_after_free_thoughts(random_engine, tokenizer, reasoning_parser):
    config = ServerConfig(port=0, reasoning_parser=reasoning_parser, served_model_name="tiny")
    ends = {"gpt_oss": ["<|end|>"], "mistral": [], "none": []}.get(reasoning_parser, ["</think>"])
    bias = {token: 4.0 for end in ends for token in tokenizer.encode(end)}
    server = Running(Frontend(random_engine, tokenizer, seed=0, default_sampling={"logit_bias": bias}), config)
    server.start()
    body = {
        "messages": [USER],
        "n": 8,
        "seed": 1,
        "max_tokens": 600,
        "structured_outputs": {"regex": "[ab]{4}"},
        "chat_template_kwargs": {"enable_thinking": True},
    }
    if reasoning_parser == "mistral":  # eight tokens of this tokenizer, which no random model writes in their order
        body["thinking_token_budget"] = 20
    choices = server.post(CHAT, body).json()["choices"]
    finished = [choice["message"] for choice in choices if choice["finish_reason"] == "stop"]
    assert finished
    for message in finished:
        assert len(message["content"]) == 4
        assert set(message["content"]) <= set("ab")
    assert any(message.get("reasoning") for message in finished) == (reasoning_parser != "none")
    server.server.stop()
    assert server.wait() == 0


def test_real_clients(forced):
    with openai.OpenAI(base_url=f"{forced.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        answer = client.chat.completions.create(
            model="tiny",
            messages=[USER],
            tools=TOOLS,
            tool_choice="required",
            seed=1,
            max_tokens=400,
            parallel_tool_calls=False,
        )
        with client.chat.completions.stream(
            model="tiny",
            messages=[USER],
            tools=TOOLS,
            tool_choice="required",
            seed=1,
            max_tokens=400,
            parallel_tool_calls=False,
        ) as stream:
            streamed = stream.get_final_completion()
    calls = [
        [(call.function.name, call.function.arguments) for call in each.choices[0].message.tool_calls]
        for each in (answer, streamed)
    ]
    assert calls[0] == calls[1]
    assert calls[0]


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
