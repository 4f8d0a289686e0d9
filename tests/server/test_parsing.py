"""What a model writes, taken apart: every syntax, and the same result wherever the text is cut into pieces."""

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.server.parsing.answer import PIECE, AnswerParser
from jaxserve.server.parsing.events import CallArguments, CallStart, Content, Reasoning, joined
from jaxserve.server.parsing.json_stream import CallReader, ValueScanner
from jaxserve.server.parsing.reasoning import ReasoningCounter, ThinkParser, is_open
from jaxserve.server.parsing.syntax import TOOL_PARSERS
from jaxserve.server.parsing.typed_value import value_types

NAMES = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"enum": ["C", "F"]},
            "place": {"$ref": "#/$defs/place"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"place": {"type": "array", "items": {"type": "number"}}},
    },
    "now": {"type": "object"},
    "f": {},
}
ARGUMENTS = '{"city": "Br\\u00fcn\\"n{]", "days": [1, {"x": null}], "s": "</tool_call> [TOOL_CALLS] \\\\"}'

SEP = "<｜tool▁sep｜>"  # noqa: RUF001
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def tagged(name, **arguments):
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def call(name, arguments="{}"):
    return [CallStart(name), CallArguments(arguments)]


# (parser, the model's text, what is in it)
CASES = [
    ("hermes", "Just words, 1 < 2.", [Content("Just words, 1 < 2.")]),
    ("hermes", "ends in a marker's beginning <tool_", [Content("ends in a marker's beginning <tool_")]),
    ("hermes", " spaces \n", [Content(" spaces \n")]),
    ("hermes", hermes("now", "{}"), call("now")),
    ("hermes", hermes("get_weather", ARGUMENTS), call("get_weather", ARGUMENTS)),
    (
        "hermes",
        f"\n\nLet me look.\n{hermes('now', '{}')}\n{hermes('f', '[1]')}\nDone. ",
        [Content("\n\nLet me look."), *call("now"), *call("f", "[1]"), Content("\nDone.")],
    ),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', call("f", '{"a": 1}')),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', call("f")),
    ("hermes", '<tool_call>{"name": "f", "parameters": null}</tool_call>', call("f")),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', call("f", '{"a": 1}')),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call> x',
        [*call("f", '{"a": 1}'), Content(" x")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', [CallStart("f"), CallArguments('{"a": ')]),
    ("hermes", "<tool_call> not JSON </tool_call>", [Content("<tool_call> not JSON </tool_call>")]),
    ("hermes", '<tool_call>{"name": 3}', [Content('<tool_call>{"name": 3}')]),
    ("hermes", '<tool_call>{"na', [Content('<tool_call>{"na')]),
    # Half a surrogate cannot be sent.
    ("hermes", '<tool_call>{"name": "\\ud83d"}', [Content('<tool_call>{"name": "\\ud83d"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "\\ud83d"}</tool_call>', call("f", '"\\ud83d"')),
    ("qwen3_coder", tagged("get_weather", place='["\\uD83D"]'), call("get_weather", '{"place": ["\\ud83d"]}')),
    ("llama3_json", "It is {not} a call.", [Content("It is {not} a call.")]),
    ("llama3_json", f'{{"name": "f", "parameters": {ARGUMENTS}}}', call("f", ARGUMENTS)),
    ("llama3_json", '\n<|python_tag|>{"name": "now", "parameters": {}}', call("now")),
    ("llama3_json", 'Hm.\n<|python_tag|>{"name": "now", "parameters": {}}', [Content("Hm."), *call("now")]),
    (
        "llama3_json",
        '{"name": "now", "parameters": {}}; {"name": "f", "parameters": {"a": 2}}\n',
        [*call("now"), *call("f", '{"a": 2}')],
    ),
    ("llama3_json", '{"name": "nobody", "age": 3} ', [Content('{"name": "nobody", "age": 3} ')]),
    ("llama3_json", '  {"a": 1}', [Content('  {"a": 1}')]),
    ("llama3_json", '<|python_tag|>print("x")', [Content('<|python_tag|>print("x")')]),
    ("mistral", "Words [TOOL", [Content("Words [TOOL")]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": [1, 2]}}]', call("f", '{"a": [1, 2]}')),
    (
        "mistral",
        'Yes. [TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "f", "arguments": {"a": "]"}, "id": "a1"}] ',
        [Content("Yes."), *call("now"), *call("f", '{"a": "]"}')],
    ),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}", call("f", ARGUMENTS)),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}[TOOL_CALLS]now{}", [*call("f"), *call("now")]),
    ("mistral", "[TOOL_CALLS]nothing more", [Content("[TOOL_CALLS]nothing more")]),
    ("mistral", "[TOOL_CALLS][1]", [Content("[TOOL_CALLS][1]")]),
    ("deepseek_v3", f"{CALLS}{CALL}f{SEP}{ARGUMENTS}{CALL_END}{CALLS_END}", call("f", ARGUMENTS)),
    (
        "deepseek_v3",
        f"So.\n\n{CALLS}{CALL}function{SEP}f\n```json\n{ARGUMENTS}\n```{CALL_END}\n"
        f"{CALL}function{SEP}now\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
        [Content("So."), *call("f", ARGUMENTS), *call("now")],
    ),
    ("deepseek_v3", f"{CALLS}{CALL}function{SEP}{{}}{CALL_END}{CALLS_END}", call("function")),
    ("deepseek_v3", f"{CALLS}{CALL}f", [Content(f"{CALLS}{CALL}f")]),
    ("deepseek_v3", f"{CALLS} hm {CALL}function{SEP}f\n", [Content(f"{CALLS} hm {CALL}function{SEP}f\n")]),
    ("deepseek_v3", f"{CALLS} nothing", [Content(f"{CALLS} nothing")]),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>Thinking.<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
        [Reasoning("Thinking."), Content("Hello.")],
    ),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        [Reasoning("A\nB"), *call("f", '{"a": 1}')],
    ),
    ("gpt_oss", " to=functions.now<|channel|>commentary json<|message|>{}", call("now")),
    (
        "gpt_oss",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Done<|return|>",
        [Content("I look.\nDone")],
    ),
    ("gpt_oss", "No channels <| at all", [Content("No channels <| at all")]),
    ("gpt_oss", "<|channel|>final<|message|>cut <|en", [Content("cut <|en")]),
    ("qwen3_coder", "1 <function, 2 <tool_cal", [Content("1 <function, 2 <tool_cal")]),
    (
        "qwen3_coder",
        f"I look.\n{tagged('get_weather', city='Br\u00fcn"n\n</p', days=2)}\n{tagged('now')}\n",
        [Content("I look."), *call("get_weather", '{"city": "Br\u00fcn\\"n\\n</p", "days": 2}'), *call("now")],
    ),
    (
        "qwen3_coder",
        tagged("get_weather", city="7", days="many", units="F", place="[1, 2.5]", note="null"),
        call("get_weather", '{"city": "7", "days": "many", "units": "F", "place": [1, 2.5], "note": null}'),
    ),
    (
        "qwen3_coder",
        tagged("f", a="True", b="1e999", c="{'x'", d="", e="NaN", g="\n\n x"),
        call("f", '{"a": true, "b": "1e999", "c": "{\'x\'", "d": "", "e": "NaN", "g": "\\n\\n x"}'),
    ),
    ("qwen3_coder", "<function=now>\n</function>\n</tool_call> x", [*call("now"), Content(" x")]),
    ("qwen3_coder", hermes("f", ARGUMENTS), call("f", ARGUMENTS)),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOsl",
        [CallStart("get_weather"), CallArguments('{"city": "Osl')],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n2",
        [CallStart("get_weather"), CallArguments('{"days": ')],
    ),
    ("qwen3_coder", "<tool_call> a tag,<function=", [Content("<tool_call> a tag,<function=")]),
    (
        "glm45",
        "So.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo\n</arg_value>\n<arg_key>days</arg_key>"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        [Content("So."), *call("get_weather", '{"city": "Oslo\\n", "days": 2}'), *call("now")],
    ),
    ("glm45", hermes("now", "{}"), call("now")),
    ("glm45", "<tool_call>is a tag</tool_call>", [Content("<tool_call>is a tag</tool_call>")]),
    ("glm45", "<tool_call>now", [Content("<tool_call>now")]),
]


def read(parser, pieces):
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


def cut(text, places):
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[first:last] for first, last in itertools.pairwise(bounds)]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_every_syntax_is_understood_in_one_piece_and_in_single_characters(name, text, expected):
    assert read(TOOL_PARSERS[name](NAMES), [text]) == expected
    assert read(TOOL_PARSERS[name](NAMES), list(text)) == expected


@settings(max_examples=300)
@given(case=st.sampled_from(CASES), places=st.lists(st.integers(0, 1000), max_size=12))
def test_where_the_text_is_cut_makes_no_difference(case, places):
    name, text, expected = case
    assert read(TOOL_PARSERS[name](NAMES), cut(text, places)) == expected


CIRCLE = {
    "properties": {
        "a": {"$ref": "#/$defs/a"},
        "b": {"$ref": "#/$defs/b"},
        "many": {"anyOf": [{"type": "null"}] * 10**5},
    },
    "$defs": {
        "a": {"anyOf": [*[{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}] * 50, {"type": "integer"}]},
        "b": {"oneOf": [*[{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}] * 50, {"type": ["string", "null"]}]},
    },
}


@pytest.mark.parametrize(
    ("schema", "key", "types"),
    [
        (NAMES["get_weather"], "city", {"string"}),
        (NAMES["get_weather"], "units", {"string"}),
        (NAMES["get_weather"], "place", {"array"}),
        (NAMES["get_weather"], "note", {"string", "null"}),
        (NAMES["get_weather"], "other", set()),
        ({}, "a", set()),
        ({"properties": {"a": {"const": 1.5}}}, "a", {"number"}),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {}]}}}, "a", set()),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "a", set()),
        ({"properties": {"a": {"$ref": "http://x/#/a"}}}, "a", set()),
        (CIRCLE, "a", {"integer", "string", "null"}),
        (CIRCLE, "many", set()),
    ],
    ids=lambda value: "-".join(sorted(value)) if isinstance(value, set) else str(value)[:40],
)
def test_what_a_schema_says_of_a_property(schema, key, types):
    """However it is written, it is said at once: the server waits."""
    assert value_types(schema, key) == types


def test_what_is_nested_too_deeply_for_python_harms_nobody():
    deep = "[" * 3000 + "]" * 3000
    text = f'<tool_call>{{"a": {deep}}}'
    assert read(TOOL_PARSERS["hermes"](NAMES), [text]) == [Content(text)]
    text = tagged("get_weather", place=deep)
    assert read(TOOL_PARSERS["qwen3_coder"](NAMES), [text]) == call("get_weather", f'{{"place": "{deep}"}}')


# Fragments that have a meaning somewhere: their soup must be read the same however it is cut.
FRAGMENTS = sorted(
    {marker for parser in TOOL_PARSERS.values() for marker in parser.markers}
    | {
        '{"name": "f", "arguments": ',
        '{"name": "now", "parameters": {}}',
        "{}",
        "}",
        '"',
        "[",
        "]",
        ", ",
        ";",
        " ",
        "\n",
        "\\",
    }
    | {"<function=f>", "<function=", "<parameter=a>\n", "\n</parameter>", "</function>", ">"}
    | {"<think>", "</think>", "x", "<", "to=functions.f", "analysis", "final", "f", "```json\n", '{"a": "b"}'}
)


@settings(max_examples=400)
@given(
    name=st.sampled_from(sorted(TOOL_PARSERS)),
    is_open=st.booleans(),
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    places=st.lists(st.integers(0, 1000), max_size=12),
)
def test_no_text_is_read_differently_in_pieces(name, is_open, text, places):
    def parser():
        return AnswerParser(thoughts=ThinkParser(is_open=is_open), calls=TOOL_PARSERS[name](NAMES))

    whole = read(parser(), [text])
    assert read(parser(), cut(text, places)) == whole
    assert read(parser(), list(text)) == whole


@settings(max_examples=200)
@given(text=st.text(max_size=40), name=st.sampled_from(sorted(TOOL_PARSERS)))
def test_ordinary_text_comes_out_as_it_is(text, name):
    assert read(TOOL_PARSERS[name](NAMES), list(text)) == ([Content(text)] if text else [])


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_no_beginning_of_a_marker_is_shown(name):
    parser = TOOL_PARSERS[name](NAMES)
    marker = {"gpt_oss": "<|channel|>analysis<|message|>", "llama3_json": "<|python_tag|>"}.get(name, parser.markers[0])
    shown = [event for character in "" + marker for event in parser.push(character)]
    assert shown == []


@pytest.mark.parametrize(
    ("is_open", "text", "expected"),
    [
        (True, "\nHm, \n so.\n\n</think>\n\nYes. ", [Reasoning("Hm, \n so."), Content("Yes. ")]),
        (True, "<think>\nHm.</think>Yes.", [Reasoning("Hm."), Content("Yes.")]),
        (True, "never ends \n", [Reasoning("never ends")]),
        (True, "</think>\n\nYes.", [Content("Yes.")]),
        (False, "\n<think>\n\n</think>\n\nYes.", [Content("Yes.")]),
        (False, "<think>Hm.</thin</think>Yes.</think>", [Reasoning("Hm.</thin"), Content("Yes.</think>")]),
        (False, " <thing> Yes.", [Content(" <thing> Yes.")]),
        (False, "<thi", [Content("<thi")]),
        (False, "  ", [Content("  ")]),
    ],
)
def test_thoughts_and_answer(is_open, text, expected):
    assert read(ThinkParser(is_open=is_open), [text]) == expected
    assert read(ThinkParser(is_open=is_open), list(text)) == expected


@pytest.mark.parametrize(
    ("parser", "pieces", "num_thoughts"),
    [
        (ThinkParser(is_open=True), ["A", " b", "\n", "</think>", "\n\n", "Yes", " <think>", "."], 3),
        (ThinkParser(is_open=False), ["<think>", "A", "</th", "ink>", "Yes", "<think>", "no"], 2),
        (ThinkParser(is_open=False), ["Yes", "<think>", "no", "</think>"], 0),
        (ThinkParser(is_open=True), ["never", " ends"], 2),
        (
            TOOL_PARSERS["gpt_oss"]({}),
            re.findall(
                r"<.*?>|\w+| b",
                "<|channel|>analysis<|message|>A b<|end|><|start|>assistant<|channel|>final<|message|>Yes",
            ),
            2,
        ),
    ],
)
def test_thoughts_are_counted(parser, pieces, num_thoughts):
    counter = ReasoningCounter(parser, token_text=pieces.__getitem__)
    assert counter.count([]) + counter.count([0]) + counter.count(range(1, len(pieces))) == num_thoughts


def test_a_prompt_is_open_when_its_last_think_is():
    assert is_open("...<|Assistant|><think>\n")
    assert not is_open("<think>\n\n</think>\n\n")
    assert not is_open("Hello")


def test_calls_behind_thoughts_and_only_so_many():
    def parser(max_calls):
        return AnswerParser(
            thoughts=ThinkParser(is_open=True), calls=TOOL_PARSERS["hermes"](NAMES), max_calls=max_calls
        )

    text = f"<tool_call> is a tag.</think>\n\n{hermes('now', '{}')}\n{hermes('f', '{}')}"
    assert read(parser(None), list(text)) == [Reasoning("<tool_call> is a tag."), *call("now"), *call("f")]
    assert read(parser(1), list(text)) == [Reasoning("<tool_call> is a tag."), *call("now")]


def test_a_long_answer_is_read_in_pieces(monkeypatch):
    """Read at once, one of 600 kB full of markers took up to 17 s, in which the server did nothing else."""
    calls, lengths = TOOL_PARSERS["hermes"](NAMES), []
    push = calls.push
    monkeypatch.setattr(calls, "push", lambda text: (lengths.append(len(text)), push(text))[1])
    text = f"Some words before {hermes('f', '[1]')}" * 1000
    events = read(AnswerParser(calls=calls), [text])
    assert events == [Content("Some words before"), *call("f", "[1]")] * 1000
    assert max(lengths) <= PIECE
    assert sum(lengths) == len(text)


@given(
    value=st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists), indent=st.sampled_from([None, 1])
)
def test_a_value_ends_where_it_ends(value, indent):
    text = json.dumps(value, indent=indent)
    scanner, num_read = ValueScanner(), 0
    for character in text + ", more":
        if scanner.push(character) is not None:
            break
        num_read += 1
    assert num_read in (len(text), len(text) - 1)  # a scalar ends with what follows it, others with their last bracket
    assert ValueScanner().push(text + ", more") == len(text)


def test_an_object_that_is_no_call_gives_its_text_back():
    reader = CallReader({"f"})
    assert reader.push(' {"name": "g", "arguments": {}} rest') == ([], ', "arguments": {}} rest')
    assert reader.is_failed
    assert reader.raw == ' {"name": "g"'
