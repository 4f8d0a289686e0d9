"""Custom tools, which take a text: their grammars, and their calls, pieced together from what a model writes."""

import json
import random
import re

import pytest
from serving import assert_error, response_events, running, serving, synchronous

from jaxserve.answers.tools.custom import InputReader, text_of
from jaxserve.answers.tools.lark_regex import lark_regex
from jaxserve.engine.frontend import Frontend
from jaxserve.tokenizer import Tokenizer

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
USER = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a b"}', "a b"),
        (' { "input" : "" } ', ""),
        (r'{"input": "a\n\"b\"\\ \u00e9 \ud83d\ude00 é"}', 'a\n"b"\\ é \U0001f600 é'),
        ('{"input": "line\nbreak\tas it is"}', "line\nbreak\tas it is"),
        ('{"input": "cut', "cut"),
        ('{"input": "cut\\', "cut"),
        (r'{"input": "cut \ud83d', "cut "),
        (r'{"input": "half \ud83d of \ud83d\n a \ude00 pair\uD83D"}', "half \ufffd of \ufffd\n a \ufffd pair\ufffd"),
        ('{"input": "a", "more": 1}', "a"),
        ('{"patch": "a"}', "a"),
        ('{"patch": "a", "more": 1}', '{"patch": "a", "more": 1}'),
        ("a b", "a b"),
        ("", ""),
        ("{}", "{}"),
    ],
)
def test_the_text_in_arguments(arguments, text):
    assert text_of(arguments) == text
    rng = random.Random(0)
    for size in (1, 2, 5):
        reader, pieces = InputReader(), []
        rest = arguments
        while rest:
            length = rng.randint(1, size)
            pieces.append(reader.push(rest[:length]))
            rest = rest[length:]
        assert "".join(pieces) + reader.finish() == text


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('start: "a" "b"', ["ab"], ["a", "abc"]),
        ('start: "a" | "b."', ["a", "b."], ["bx", "ab."]),
        ('start: one\n     | two+\none: "1" -> first\ntwo: "2"  // twos\n', ["1", "2", "222"], ["12", ""]),
        ('?start: ("a" | "b")* ["c"]\n', ["", "abc", "c"], ["cc"]),
        ('start: "a".."c"~2..3\n', ["ab", "abc"], ["a", "abcd", "ad"]),
        ('start: "x"~2 LF?\n%import common.LF\n', ["xx", "xx\n"], ["x"]),
        ('start: INT ("+" NUM)*\n%import common.INT\n%import common.SIGNED_NUMBER -> NUM\n', ["1+2", "1+-2.5"], ["+"]),
        ('start: A /[a/]+\\/b/\nA.2: "\\"\\\\\\n"\n', ['"\\\na/b'], ["a/b"]),
        ("start: WORD WS_INLINE\n%import common (WORD, WS_INLINE)\n", ["ab \t"], ["ab"]),
    ],
)
def test_a_grammar_as_an_expression(grammar, good, bad):
    expression = lark_regex(grammar)
    assert expression is not None
    assert [text for text in good if not re.fullmatch(expression, text)] == []
    assert [text for text in bad if re.fullmatch(expression, text)] == []


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "(" start ")" | "x"',
        "start: a\na: b\nb: a?",
        "start: a",
        'other: "a"',
        'start: "a" "b"\n%ignore " "',
        'start: "a"i',
        "start: /a(?=b)/",
        "start: /a/i",
        "%import other.A\nstart: A",
        "start: (",
        'start: "a" ))',
        "",
        "\n".join(["start: a9", 'a0: "x"', *(f"a{i}: a{i - 1} a{i - 1} a{i - 1} a{i - 1}" for i in range(1, 10))]),
    ],
    ids=lambda grammar: grammar[:30],
)
def test_grammars_that_are_not_rewritten(grammar):
    assert lark_regex(grammar) is None


PLUS = {"type": "grammar", "syntax": "lark", "definition": 'start: "[" DIGIT ("+" DIGIT)? "]\\n"\n%import common.DIGIT'}
CUSTOM = {"type": "custom", "name": "add", "description": "Adds.", "format": PLUS}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
SPACE = {"type": "namespace", "name": "mcp__a", "description": "A.", "tools": [FUNCTION, CUSTOM]}


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_forced_text_follows_its_grammar(random_engine, random_model, path):
    frontend = Frontend(random_engine, Tokenizer.load(random_model), seed=0)
    with serving(frontend, tool_call_parser="hermes", served_model_name="fake") as server:
        if path == CHAT:
            grammar = {"type": "grammar", "grammar": {name: PLUS[name] for name in ("syntax", "definition")}}
            body = {"messages": [USER], "tools": [{"type": "custom", "custom": {"name": "add", "format": grammar}}]}
            body |= {"tool_choice": {"type": "custom", "custom": {"name": "add"}}, "max_tokens": 300, "n": 3, "seed": 1}
            answer = server.post(path, body)
            assert answer.status_code == 200, answer.text
            texts = [choice["message"]["tool_calls"][0]["custom"]["input"] for choice in answer.json()["choices"]]
        else:
            body = {"input": "hello", "tools": [SPACE], "max_output_tokens": 300, "seed": 1}
            body["tool_choice"] = {"type": "custom", "name": "add"}
            answer = server.post(path, body)
            assert answer.status_code == 200, answer.text
            (item,) = answer.json()["output"]
            assert (item["type"], item["name"], item["namespace"]) == ("custom_tool_call", "add", "mcp__a")
            texts = [item["input"]]
    assert [text for text in texts if not re.fullmatch(r"\[\d(\+\d)?\]\n", text)] == []


@pytest.fixture(scope="module")
def agent(tokenizer):
    with running(tokenizer, client_options={"max_model_len": 4096}, tool_call_parser="hermes") as server:
        yield server


HOSTED = [
    *("web_search", "web_search_preview", "web_search_preview_2025_03_11", "web_search_2025_08_26", "local_shell"),
    *("shell", "image_generation", "tool_search", "mcp", "file_search", "code_interpreter", "computer_use_preview"),
    *("computer", "apply_patch"),
]


@pytest.mark.parametrize("kind", HOSTED)
def test_hosted_tools_are_left_out_unless_one_is_demanded(agent, kind, caplog):
    agent.says("Hello.")
    body = {"input": "hello", "tools": [{"type": kind}, FUNCTION]}
    for _ in range(2):
        answer = agent.post(RESPONSES, body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["tools"][0] == {"type": kind}
    assert len([line for line in caplog.messages if f"'{kind}'" in line]) == 1
    assert_error(agent.post(RESPONSES, body | {"tool_choice": {"type": kind}}), 400, "tool_choice")
    only = {"type": "allowed_tools", "mode": "required", "tools": [{"type": kind}]}
    assert_error(agent.post(RESPONSES, body | {"tool_choice": only}), 400, "tool_choice")
    some = only | {"tools": [{"type": kind}, {"type": "function", "name": "f"}], "mode": "auto"}
    assert agent.post(RESPONSES, body | {"tool_choice": some}).status_code == 200
    none = {"input": "hello", "tools": [{"type": kind}], "tool_choice": "required"}
    assert_error(agent.post(RESPONSES, none), 400, "tool_choice")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [CUSTOM, {"type": "namespace", "name": "n"}]}, "tools[1].tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [SPACE]}]}, "tools[0].tools[0].type"),
        ({"tools": [FUNCTION, SPACE, FUNCTION]}, "tools[2].name"),
        ({"tools": [CUSTOM | {"format": {"type": "grammar", "syntax": "lark"}}]}, "tools[0].format.definition"),
        ({"tools": [CUSTOM | {"format": {"type": "xml"}}]}, "tools[0].format.type"),
        (
            {
                "tools": [CUSTOM | {"format": {"type": "grammar", "syntax": "regex", "definition": "a("}}],
                "tool_choice": "required",
            },
            "tools[0].format",
        ),
        ({"tools": [CUSTOM], "tool_choice": {"type": "custom", "name": "other"}}, "tool_choice"),
        ({"tools": [CUSTOM], "tool_choice": {"type": "custom"}}, "tool_choice.name"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "add"}]}, "input[0].input"),
        ({"input": [{"type": "tool_search_output", "tools": [{"type": "custom"}]}]}, "input[0].tools[0].name"),
        (
            {"instructions": [{"type": "additional_tools", "tools": [{"type": "custom"}]}]},
            "instructions[0].tools[0].name",
        ),
        ({"instructions": [{"type": []}]}, "instructions[0].type"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_tools_are_refused_by_name(agent, fields, param):
    assert_error(agent.post(RESPONSES, {"input": "a", **fields}), 400, param)


def test_calls_in_a_namespace_come_back(agent):
    """Also by the response's id, and by a stream that is read again."""
    calls = [{"name": "mcp__a__f", "arguments": {}}, {"name": "mcp__a__add", "arguments": {"input": "[1]\n"}}]
    agent.says("\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls))
    first = agent.post(RESPONSES, {"input": "hello", "tools": [SPACE]}).json()
    named = [(item["type"], item["namespace"], item["name"]) for item in first["output"]]
    assert named == [("function_call", "mcp__a", "f"), ("custom_tool_call", "mcp__a", "add")]
    assert first["output"][1]["input"] == "[1]\n"
    again = response_events(agent.get(f"{RESPONSES}/{first['id']}?stream=true"))
    assert again[-1]["response"]["output"] == first["output"]
    given = [event["delta"] for event in again if event["type"] == "response.custom_tool_call_input.delta"]
    assert given == ["[1]\n"]
    agent.says("Two.")
    outputs = [
        {"type": item["type"] + "_output", "call_id": item["call_id"], "output": "ok"} for item in first["output"]
    ]
    by_id = {"input": outputs, "tools": [SPACE], "previous_response_id": first["id"]}
    assert agent.post(RESPONSES, by_id).status_code == 200
    whole = {"input": [{"role": "user", "content": "hello"}, *first["output"], *outputs], "tools": [SPACE]}
    assert agent.post(RESPONSES, whole).status_code == 200
    by_id, whole = (request.prompt_token_ids for request in agent.client.submitted[-2:])
    assert by_id == whole


@pytest.mark.parametrize("length", [64, 65, 128])
def test_long_names_of_tools(agent, length):
    """Tools of MCP servers have the server's name before their own."""
    name = "mcp__" + "x" * (length - 5)
    agent.says(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>')
    answer = agent.post(RESPONSES, {"input": "hello", "tools": [FUNCTION | {"name": name}]})
    assert answer.json()["output"][0]["name"] == name
    assert_error(agent.post(RESPONSES, {"input": "a", "tools": [FUNCTION | {"name": "x" * 129}]}), 400, "tools[0].name")


def test_custom_tools_with_the_openai_client(agent):
    agent.says('<tool_call>\n{"name": "add", "arguments": {"input": "[1+2]\\n"}}\n</tool_call>')
    with synchronous(agent) as client:
        with client.responses.stream(model="fake", input="hello", tools=[CUSTOM]) as stream:
            kinds = [event.type for event in stream]
            (item,) = stream.get_final_response().output
        assert kinds.count("response.custom_tool_call_input.done") == 1
        assert (item.type, item.name, item.input) == ("custom_tool_call", "add", "[1+2]\n")
        tool = {"type": "custom", "custom": {"name": "add"}}
        message = client.chat.completions.create(model="fake", messages=[USER], tools=[tool]).choices[0].message
        (call,) = message.tool_calls
        assert (call.type, call.custom.name, call.custom.input) == ("custom", "add", "[1+2]\n")
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        again = [USER, message.model_dump(exclude_none=True), result]
        assert client.chat.completions.create(model="fake", messages=again, tools=[tool]).choices[0].message.tool_calls
