"""A checkpoint's `response_template` as a syntax: reads as transformers' own parser does, and runs no pattern."""

import contextlib
import copy
import json
import time

import pytest
from transformers.utils.chat_parsing import parse_response
from written_answers import message_of

from jaxserve.answers.choosing.patterns import MAX_LENGTH, UnsupportedPattern, variants
from jaxserve.answers.choosing.response_template import UnsupportedTemplate, from_response_template
from jaxserve.answers.syntaxes.syntax import Channels

# ruff: noqa: E501 (an answer is told in one piece)

NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THINK = {"open": "<think>", "close_pattern": r"</think>\s*"}
WORDS = {"close_pattern": r"<\|end\|>\s*|$"}


def template(calls, *, thoughts=THINK, content=WORDS):
    fields = {"reasoning_content": thoughts, "tool_calls": calls, "content": content}
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|turn|>",
        "fields": {k: v for k, v in fields.items() if v},
    }


OBJECT = {
    "open": "<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
TAGS = {
    "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
    "close_pattern": r"</tool_call>\s*",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
        "value_parser": {"name": "json", "args": {"allow_non_json": True}},
    },
    "transform": NAMED,
}
PAIRS = {
    "open_pattern": r"<tool_call>(?P<name>\S+)\n",
    "close": "</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\n<arg_value>(?P<value>.*?)</arg_value>"},
    "transform": NAMED,
}
LIST = {
    "open": "<|START_ACTION|>",
    "close": "<|END_ACTION|>",
    "content": "json",
    "transform_each": True,
    "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
}
INSIDE = {
    "open": ["<call>", "<Call>"],
    "close": "</call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{content.tool}", "arguments": "{content.input}"}},
}
SPELLED = {
    "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
    "close_pattern": r"\}<\|end\|>\s*",
    "repeats": True,
    "content": "json",
    "transform": NAMED,
}
OWN_QUOTES = {
    "open_pattern": r"<\|tool_call>call:(?P<name>\w+)(?=\{)",
    "close": "<tool_call|>",
    "repeats": True,
    "content": "json",
    "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
    "transform": NAMED,
}
SECTION = {
    "open_pattern": r"(?:<calls>\s*)?<invoke name=\"(?P<name>[^\"]+)\">",
    "close_pattern": r"</invoke>\s*(?:</calls>)?",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>'},
    "transform": NAMED,
}
MARKED = {
    "open_pattern": r"<begin>function<sep>(?P<name>\S+)\n```json\n",
    "close_pattern": r"\n```<end>\s*",
    "repeats": True,
    "content": "json",
    "transform": NAMED,
}
PYTHON = {
    "open_pattern": r"(?:<\|calls\|>\[|,\s*)(?P<name>\w+)\(",
    "close_pattern": r"\)(?:\]<\|/calls\|>)?\s*",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": r"(?P<key>\w+)=(?P<value>\"[^\"]*\"|[^,)]*)",
        "value_parser": {"name": "json", "args": {"allow_non_json": True}},
    },
    "transform": NAMED,
}
CITY = '{"city": "Brünn", "days": 3}'
WRITTEN = {
    "object": (
        OBJECT,
        '<tool_call>\n{"name": "weather", "arguments": '
        + CITY
        + '}\n</tool_call>\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    ),
    "tags": (
        TAGS,
        "<tool_call>\n<function=weather>\n<parameter=city>\nBrünn\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "pairs": (
        PAIRS,
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Brünn</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    ),
    "list": (
        LIST,
        '<|START_ACTION|>[{"tool_name": "weather", "parameters": '
        + CITY
        + '}, {"tool_name": "now", "parameters": {}}]<|END_ACTION|>',
    ),
    "keys of its own": (
        INSIDE,
        '<call>{"tool": "weather", "input": ' + CITY + '}</call><call>{"tool": "now", "input": {}}</call>',
    ),
    "spelled object": (SPELLED, '{"name": "weather", "parameters": ' + CITY + "}<|end|>"),
    "quotes of its own": (
        OWN_QUOTES,
        '<|tool_call>call:weather{city:<|"|>Brünn<|"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|>',
    ),
    "section": (
        SECTION,
        '<calls>\n<invoke name="weather">\n<parameter name="city">Brünn</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</calls>',
    ),
    "marks": (
        MARKED,
        "<begin>function<sep>weather\n```json\n" + CITY + "\n```<end>\n<begin>function<sep>now\n```json\n{}\n```<end>",
    ),
    "Python": (PYTHON, '<|calls|>[weather(city="Brünn", days=3), now()]<|/calls|>'),
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in {"weather": {"city": {"type": "string"}, "days": {"type": "integer"}}, "now": {}}.items()
]


def reference(spec, text):
    """Return the message that transformers reads."""
    message = parse_response(text, spec, prefix="<|turn|>", tools=TOOLS)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return message.get("content", ""), message.get("reasoning_content", ""), calls


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("kind", WRITTEN)
def test_an_answer_is_read_as_transformers_reads_it(kind, size):
    calls, written = WRITTEN[kind]
    spec = template(calls)
    syntax = from_response_template(spec)
    for text in (f"<think>\nHm.\n</think>\n\n{written}", written, "<think>So.</think>Yes, <b>really</b>."):
        read = message_of(syntax, text, TOOLS, size=size)
        assert read == reference(spec, text), text
    assert message_of(syntax, written, TOOLS, size=size)[2][0] == ("weather", {"city": "Brünn", "days": 3})


def test_words_with_marks_of_their_own():
    spec = template(
        LIST,
        thoughts={"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
        content={"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
    )
    text = "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>"
    assert message_of(from_response_template(spec), text, TOOLS) == ("Yes.", "Hm.", []) == reference(spec, text)


def test_channels_are_those_of_harmony():
    spec = template(OBJECT, thoughts={"open": "<|channel|>analysis<|message|>", "close": "<|end|>"})
    syntax = from_response_template(spec)
    assert syntax.calls is not None
    assert isinstance(syntax.calls.arguments, Channels)


def test_a_template_without_calls_or_thoughts():
    assert from_response_template(template(None)).calls is None
    assert from_response_template(template(OBJECT, thoughts=None)).thoughts is None


def changed(field, without=(), **keys):
    """Return a template in which some keys of a field are others."""
    spec = copy.deepcopy(template(TAGS))
    fields = spec["fields"]
    fields[field] = {key: value for key, value in fields[field].items() if key not in without} | keys
    return spec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([], "response_template has no fields"),
        ({"fields": {}, "start": 1}, "response_template.start is not known"),
        ({"fields": {}, "version": 2}, "response_template.version is not 1"),
        ({"fields": {"citations": {}}}, "response_template.fields.citations is no part of an answer"),
        (
            {"fields": {"thinking": THINK, "reasoning": THINK}},
            "response_template.fields.reasoning is a second field of thoughts",
        ),
        (changed("content", pattern="x"), "response_template.fields.content.pattern is not known"),
        (
            changed("reasoning_content", content="json"),
            "response_template.fields.reasoning_content.content is not 'text'",
        ),
        (
            changed("reasoning_content", close_pattern="$"),
            "response_template.fields.reasoning_content.close is missing",
        ),
        (
            changed("reasoning_content", open=[""]),
            "response_template.fields.reasoning_content.open has a text that is empty",
        ),
        (
            changed("reasoning_content", without=["open"], open_pattern=r"(?=[\s\S]*?</think>)"),
            "response_template.fields.reasoning_content.open_pattern has ",
        ),
        (
            changed("tool_calls", open_pattern="(a+)+b"),
            "response_template.fields.tool_calls.open_pattern repeats something with '+'",
        ),
        (
            changed("tool_calls", open_pattern=r"\s*"),
            "response_template.fields.tool_calls.open_pattern stands for nothing",
        ),
        (changed("tool_calls", content="kv-lines"), "response_template.fields.tool_calls.content is 'kv-lines'"),
        (
            changed("tool_calls", transform={"name": "{name}"}),
            "response_template.fields.tool_calls.transform does not say",
        ),
        (
            changed("tool_calls", content_args={"tag_pattern": "<(?P<key>.*)>"}),
            "response_template.fields.tool_calls.content_args.tag_pattern is not a key and a value",
        ),
        (
            changed("tool_calls", content_args=None),
            "response_template.fields.tool_calls.content_args.tag_pattern is no text",
        ),
        (
            changed("tool_calls", close_pattern="</a>|<b>"),
            "response_template.fields.tool_calls.close has texts that are not beginnings",
        ),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(spec, message):
    with pytest.raises(UnsupportedTemplate) as error:
        from_response_template(spec)
    assert str(error.value).startswith(message)


VALUES = [None, 7, True, "x", [], [7], {"a": 1}]


@pytest.mark.parametrize(
    "key", ["open", "open_pattern", "close", "close_pattern", "content", "content_args", "transform"]
)
@pytest.mark.parametrize("value", VALUES)
def test_values_of_other_types_raise_nothing_else(key, value):
    for field in template(TAGS)["fields"]:
        with contextlib.suppress(UnsupportedTemplate):
            from_response_template(changed(field, **{key: value}))


@pytest.mark.parametrize("value", VALUES)
def test_what_is_no_template_is_refused(value):
    for spec in (value, {"fields": value}, {"fields": {"tool_calls": value}}):
        with pytest.raises(UnsupportedTemplate):
            from_response_template(spec)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|a)*b", "(?:x+)+", r"(\w+)\1", "a{1,9999}", "(?<=a)b", "(?i)a", "(?P=name)", "[", "(", "a)", "\\", ".*", r"\w", "a**", "^a",
        "(?:" * 200 + ")" * 200, "(a?)" * 40, "|".join(map(str, range(100))), "a" * (MAX_LENGTH + 1),
    ],
)  # fmt: skip
def test_patterns_that_are_more_than_marks_are_refused_quickly(pattern):
    start = time.thread_time()
    with pytest.raises(UnsupportedPattern):
        variants(pattern)
    assert time.thread_time() - start < 10  # garbage of other tests may be collected meanwhile


@pytest.mark.slow
def test_an_answer_that_is_long_and_odd_is_read_in_linear_time():
    syntax = from_response_template(template(TAGS))
    text = "<tool_call>" * 20_000 + "<function=" * 20_000 + "</think>" * 20_000
    start = time.thread_time()  # other work on the machine and in this process does not count
    message_of(syntax, text, TOOLS)
    assert time.thread_time() - start < 10


def test_a_checkpoint_brings_it(tmp_path, tokenizer):
    from jaxserve.tokenizer import Tokenizer

    tokenizer.save(tmp_path)
    assert Tokenizer.load(tmp_path).response_template is None
    file = tmp_path / "tokenizer_config.json"
    spec = template(OBJECT)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"response_template": spec}))
    assert Tokenizer.load(tmp_path).response_template == spec
