"""Tools and formats over HTTP: what a random model is constrained to write."""

import json

import jsonschema
import pytest
from depths import quick_only
from serving import assert_error, frames, serving, synchronous
from tool_cases import CHAT, SCHEMAS, TOOLS, USER, functions, join, without_ids

from jaxserve.answers.syntaxes.syntax import Tags
from jaxserve.answers.syntaxes.table import TOOL_PARSERS
from jaxserve.answers.tools.tool import Tool
from jaxserve.engine.frontend import Frontend
from jaxserve.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(random_model):
    return Tokenizer.load(random_model)


# One of each way to write a call, and of each kind of marks; `test_syntax_grammars` has the grammars of all.
FORCED = ["hermes", "llama3_json", "mistral", "gpt_oss", "qwen3_coder", "kimi_k2", "gemma4", "lfm2", "pythonic"]
FORCED += ["glm45"]


@pytest.fixture(scope="module", params=quick_only([*FORCED, "none"], "qwen3_coder"))
def forced(request, random_engine, tokenizer):
    """A server for each syntax, over the same engine. Closing marks are made likely, or texts would not end."""
    bias = dict.fromkeys(['"', "}", '"}', ",", "<|end|>"], 4.0)
    calls = TOOL_PARSERS.get(request.param, TOOL_PARSERS["hermes"])[0]
    if isinstance(calls.arguments, Tags):
        bias |= dict.fromkeys([calls.arguments.value[1], calls.section[1] or calls.call[1]], 7.0)
    defaults = {"logit_bias": {token: value for text, value in bias.items() for token in tokenizer.encode(text)}}
    frontend = Frontend(random_engine, tokenizer, seed=0, default_sampling=defaults)
    with serving(frontend, tool_call_parser=request.param, served_model_name="tiny") as server:
        yield server


def check_calls(message, names):
    for function in functions(message):
        assert function["name"] in names
        jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])


@pytest.mark.slow
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


PARAMETERS = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "maxItems": 3},
        "sort": {"oneOf": [{"const": "up"}, {"enum": ["up", "down"]}]},
        "source": {"type": "string", "format": "uri-reference", "maxLength": 3},
    },
    "required": ["tags", "sort"],
    "minProperties": 1,
}


def test_tools_that_no_grammar_can_follow_to_the_end(forced):
    """What can be followed holds, unless the tool is strict: then the request is refused, and the keyword named."""
    function = {"name": "find", "parameters": PARAMETERS}
    body = {"messages": [USER], "tool_choice": "required", "seed": 5, "max_tokens": 400}
    body["parallel_tool_calls"] = False
    answer = forced.post(CHAT, body | {"n": 8, "tools": [{"type": "function", "function": function}]})
    assert answer.status_code == 200, answer.text
    choices = [each for each in answer.json()["choices"] if each["finish_reason"] == "tool_calls"]
    assert choices
    followed = json.loads(json.dumps(PARAMETERS).replace('"uniqueItems": true, ', "").replace("oneOf", "anyOf"))
    for choice in choices:
        for call in functions(choice["message"]):
            jsonschema.validate(json.loads(call["arguments"]), followed)
    answer = forced.post(CHAT, body | {"tools": [{"type": "function", "function": function | {"strict": True}}]})
    assert_error(answer, 400, "tools[0].function.parameters")
    assert "'uniqueItems'" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_an_answer_in_a_format_beside_tools(forced):
    """With tool_choice auto an answer is a call, or follows response_format."""
    if forced.server.state.model.syntax.knows_tools:
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
    syntax = forced.server.state.model.syntax
    tools = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
    calls = syntax.calls
    trigger = "<|channel|>" if syntax.has_channels else (calls.section[0] or calls.call[0]).strip()
    token_id = forced.tokenizer.added_token_id(trigger)
    if calls.is_bare or not syntax.knows_tools or token_id is None:
        assert not syntax.forcing.follows_strict([Tool("now", {}, is_strict=True)])
        return
    bias = forced.server.state.model.frontend.default_sampling["logit_bias"] | {token_id: 6.0}
    body = {"messages": [USER], "tools": tools, "n": 16, "seed": 7, "max_tokens": 300, "logit_bias": bias}
    body["parallel_tool_calls"] = False  # the mark that is likely would begin one call after the other
    answer = forced.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    calls = [choice["message"] for choice in answer.json()["choices"] if choice["finish_reason"] == "tool_calls"]
    assert calls
    for message in calls:
        check_calls(message, SCHEMAS)


@pytest.mark.parametrize(
    "reasoning_parser", quick_only(["deepseek_r1", "qwen3", "gpt_oss", "mistral", "none"], "gpt_oss", "qwen3")
)
def test_an_answer_in_a_format_after_free_thoughts(random_engine, tokenizer, reasoning_parser):
    ends = {"gpt_oss": ["<|end|>"], "mistral": [], "none": []}.get(reasoning_parser, ["</think>"])
    bias = {token: 4.0 for end in ends for token in tokenizer.encode(end)}
    frontend = Frontend(random_engine, tokenizer, seed=0, default_sampling={"logit_bias": bias})
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
    with serving(frontend, reasoning_parser=reasoning_parser, served_model_name="tiny") as server:
        choices = server.post(CHAT, body).json()["choices"]
    finished = [choice["message"] for choice in choices if choice["finish_reason"] == "stop"]
    assert finished
    for message in finished:
        assert len(message["content"]) == 4
        assert set(message["content"]) <= set("ab")
    assert any(message.get("reasoning") for message in finished) == (reasoning_parser != "none")


def test_real_clients(forced):
    with synchronous(forced) as client:
        asked = {"model": "tiny", "messages": [USER], "tools": TOOLS, "tool_choice": "required", "seed": 1}
        asked |= {"max_tokens": 400, "parallel_tool_calls": False}
        answer = client.chat.completions.create(**asked)
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion()
    calls = [
        [(call.function.name, call.function.arguments) for call in each.choices[0].message.tool_calls]
        for each in (answer, streamed)
    ]
    assert calls[0] == calls[1]
    assert calls[0]
