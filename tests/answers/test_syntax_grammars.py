"""Calls that a grammar forces: written as their syntax has it, held to their schema, and read back."""

import json
import random

import jsonschema
import pytest
from depths import examples, quick_only
from llguidance import LLMatcher, LLTokenizer
from written_answers import Message, loaded, read, reader, rows, write

from jaxserve.answers.forcing.writer import call_rules, literal
from jaxserve.answers.syntaxes.syntax import PythonCall, Tags
from jaxserve.answers.tools.tool import Tool
from jaxserve.structured.grammar import JsonOptions, arguments_schema, lark_grammar

ROWS = rows()
PLACE = {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]}
WRITTEN = {
    "typed": {
        "properties": {
            "city": {"enum": ["Oslo", "Z\u00fcrich"]},
            "days": {"type": "integer"},
            "ok": {"type": "boolean"},
        },
        "required": ["city", "days"],
    },
    "texts": {
        "properties": {
            "first": {"type": "string"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "any": {},
            "id": {"type": ["string", "integer"]},
        },
        "required": ["note", "id"],
    },
    "optional": {"properties": {"a": {"type": "string"}, "b": {"type": "boolean"}, "c": {"type": "null"}}},
    "listed": {
        "properties": {
            "code": {"type": "string", "enum": ["1", "02134", "true", "null", "", "a < b"]},
            "mode": {"enum": ["on", None, True, 3, "3"]},
            "kind": {"const": "f"},
            "level": {"type": "integer", "enum": [1, 2]},
        },
        "required": ["code", "mode", "kind", "level"],
    },
    "nested": {
        "properties": {
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
            "place": {"$ref": "#/$defs/place"},
            "maybe": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
            "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            "ratio": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
        },
        "required": ["tags", "place", "maybe", "ratio"],
        "$defs": {"place": PLACE, "unused": {"type": "string"}},
    },
    "free": {"properties": {"any": {"type": "object"}, "list": {"type": "array", "maxItems": 2}}, "required": ["any"]},
    "bounded": {"properties": {"city": {"type": "string", "maxLength": 6}}, "required": ["city"]},
    "pattern": {"properties": {"city": {"type": "string", "pattern": "^[a-c]{1,3}$"}}, "required": ["city"]},
    "open": {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "integer"}},
    "unnamed": {"maxProperties": 2},
    "referred": {"$ref": "#/$defs/place", "$defs": {"place": PLACE}},
    "either": {"anyOf": [PLACE, {"properties": {"city": {"type": "string"}}, "required": ["city"]}]},
    "odd names": {"properties": {"a b": {"type": "integer"}, "<x>": {"type": "integer"}}, "required": ["a b"]},
}


def prepared(schema):
    """Return the parameters of a tool as a writer gets them."""
    return json.loads(arguments_schema(json.dumps(schema), param="tools", options=JsonOptions()))


WRITERS = [
    (name, case)
    for name, row in sorted(ROWS.items())
    for case in (WRITTEN if isinstance(row.arguments, Tags | PythonCall) else ["typed"])
]
THOROUGH = ("glm45", "hermes", "pythonic", "qwen3_coder")


@pytest.mark.parametrize(
    ("name", "case"), quick_only(WRITERS, *(each for each in WRITERS if each[0] in THOROUGH or each[1] == "typed"))
)
def test_what_the_grammar_lets_a_model_write_is_read_back(name, case):
    """A forced call is a call, and follows its schema: whichever allowed text a model chooses."""
    row = ROWS[name]
    schemas = {"get_weather": {"type": "object", **WRITTEN[case]}, "now": {"type": "object", "properties": {}}}
    tools = [Tool(called, prepared(schema)) for called, schema in schemas.items()]
    rules = call_rules(row, tools, spell=literal, is_parallel=True)
    grammar = lark_grammar(f"start: calls\n{rules}", param="tools")
    for seed in range(examples(4)):
        text = sentence(grammar, random.Random(seed), traps(row))
        got = loaded(read(reader(row, schemas), list(text)))
        assert got.calls, text
        assert not got.content.strip(), text
        for called, written in got.calls:
            jsonschema.validate(written, schemas[called])
            assert called != "now" or not written


def traps(row):
    """Return what a model may want to write within a value: tags, also misspelled ones, and words that are no text."""
    tags = row.arguments if isinstance(row.arguments, Tags) else Tags(key=("", ""), value=("", ""))
    marks = [*tags.value, tags.key[0], *row.section, *row.call, *row.name]
    drifted = [mark.replace("</", "</ ").replace(">", " >") for mark in marks if "</" in mark]
    return [tags.value[1] or '"', *marks, *drifted, "null", "3", "True", " ", "\n\n", "\\n", "<", "</", "<b>"]


def sentence(grammar, choose, words=()):
    """Return some text that a grammar allows, with as many of these words as it allows: digits and white space are
    unlikely, and the first word likely, so that it ends.
    """
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    text = bytearray()
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        if matcher.is_accepting() and (not allowed or choose.random() < 0.5):
            break
        likely = [byte for byte in allowed if chr(byte) not in "0123456789 \n\t"]
        written = [choose.choice(likely if likely and choose.random() < 0.8 else allowed)]
        if words and choose.random() < 0.3:
            word = list((words[0] if choose.random() < 0.5 else choose.choice(words)).encode())
            written = word[: matcher.validate_tokens(word)]
        assert matcher.consume_tokens(written), matcher.get_error()
        text += bytes(written)
        assert len(text) < 20_000
    return text.decode()


FORECAST = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "ok": {"type": ["boolean", "null"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "units": {"enum": ["C", "F"]},
    },
    "required": ["city", "ok"],
}
QWEN = "<tool_call>\n<function=f>\n{}</function>\n</tool_call>"


def tag(key, value):
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def allows(name, schema, text):
    """Return whether this text may be a call of the tool f in this syntax."""
    rules = call_rules(ROWS[name], [Tool("f", prepared(schema))], spell=literal, is_parallel=False)
    matcher = LLMatcher(LLTokenizer("byte"), lark_grammar(f"start: calls\n{rules}", param="tools"))
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("name", "text", "is_allowed"),
    [
        ("qwen3_coder", QWEN.format(tag("city", "A <b>\n</b> {x}\n") + tag("ok", "true")), True),
        ("qwen3_coder", QWEN.format(tag("city", "") + tag("ok", "null") + tag("tags", '["a < b"]')), True),
        ("qwen3_coder", QWEN.format(tag("city", "A") + tag("days", "3") + tag("ok", "true") + tag("units", "F")), True),
        ("qwen3_coder", QWEN.format(tag("city", "A")), False),
        ("qwen3_coder", QWEN.format(tag("ok", "true") + tag("city", "A")), False),
        ("qwen3_coder", QWEN.format(tag("city", "</parameter>") + tag("ok", "true")), False),
        ("qwen3_coder", QWEN.format(tag("city", "< / parameter1>") + tag("ok", "true")), False),
        ("qwen3_coder", QWEN.format(tag("city", "<parameter=x>") + tag("ok", "true")), False),
        ("qwen3_coder", QWEN.format(tag("city", "A") + tag("ok", "yes")), False),
        ("qwen3_coder", QWEN.format(tag("city", "A") + tag("ok", "true") + tag("tags", '["</parameter>"]')), False),
        ("qwen3_coder", QWEN.format(tag("city", "A") + tag("ok", "true") + tag("units", "K")), False),
        ("qwen3_coder", QWEN.format(tag("city", "A") + tag("ok", "true") + tag("more", "K")), False),
        ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {"city":"A","ok":true}}\n</tool_call>', False),
        ("glm47", "<tool_call>f<arg_key>city</arg_key><arg_value>A</arg_value><arg_key>ok</arg_key><arg_value>true"
         "</arg_value></tool_call>", True),
        ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="city"'  # noqa: RUF001
         ' string="true">A</｜DSML｜parameter>\n<｜DSML｜parameter name="ok" string="false">true</｜DSML｜parameter>\n'  # noqa: RUF001
         '</｜DSML｜invoke>\n</｜DSML｜function_calls>', True),  # noqa: RUF001
        ("pythonic", '[f(city="A \\"B\\"", ok=True)]', True),
        ("pythonic", '[f(city="A", days=3, ok=None, tags=["</parameter>"], units="C")]', True),
        ("pythonic", '[f(city="A", ok=False, units="C")]', True),
        ("pythonic", '[f(city="A")]', False),
        ("pythonic", '[f(ok=True, city="A")]', False),
        ("pythonic", '[f(city="A", ok=true)]', False),
        ("pythonic", '[f(city="A", ok=True, )]', False),
        ("pythonic", '[{"name": "f", "arguments": {"city":"A","ok":true}}]', False),
        ("lfm2", '<|tool_call_start|>[f(city="A", ok=True)]<|tool_call_end|>', True),
        ("olmo3", '<function_calls>f(city="A", ok=True)</function_calls>', True),
    ],
)  # fmt: skip
def test_a_forced_call_is_written_as_the_syntax_has_it(name, text, is_allowed):
    assert allows(name, FORECAST, text) == is_allowed


@pytest.mark.parametrize("case", ["bounded", "pattern", "open", "unnamed", "referred", "either", "odd names", "free"])
def test_what_tags_cannot_say_is_an_object(case):
    arguments = {"bounded": {"city": "A"}, "pattern": {"city": "a"}, "open": {"b": 1}, "unnamed": {"x": []}}
    arguments |= {"referred": {"lat": 1}, "either": {"lat": 1}, "odd names": {"a b": 1}, "free": {"any": {"</a>": 1}}}
    for name in ("qwen3_coder", "glm45", "seed_oss"):
        (opening, closing), (before, after) = ROWS[name].call, ROWS[name].name
        text = f"{opening}{before}f{after}{json.dumps(arguments[case])}{closing}"
        assert allows(name, {"type": "object", **WRITTEN[case]}, text)


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder", "deepseek_v32", "lfm2"])
def test_a_tool_that_is_not_strict_is_called_with_any_arguments(name):
    row = ROWS[name]
    tools = [Tool("get_weather", {"type": "object", **WRITTEN["typed"]}), Tool("now", {}, is_strict=False)]
    rules = call_rules(row, tools, spell=literal, is_parallel=True, is_free=True)
    matcher = LLMatcher(LLTokenizer("byte"), lark_grammar(f"start: calls\n{rules}", param="tools"))
    text = write(row, None, Message("", (("get_weather", {"what": 'a "b"', "n": None}), ("now", {"x": 3}))))
    text = text.removeprefix("\n").replace("'a \"b\"'", '"a"')
    assert matcher.try_consume_tokens(list(text.encode())) == len(text.encode())
    assert matcher.is_accepting()
