"""Values as models write them: JSON stays as it is, what is nearly JSON becomes JSON, and schemas say what is what."""

import json

import pytest
from depths import examples
from event_cases import NAMES, call, read, reader, tagged
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.answers.literals.schema import property_kind
from jaxserve.answers.literals.source import Source
from jaxserve.answers.literals.unique import MAX_HELD, UniqueKeys
from jaxserve.answers.literals.value import ValueReader
from jaxserve.answers.parsing.events import CallArguments, CallStart, Content

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
    assert property_kind(schema, key).types == types


def test_what_is_nested_too_deeply_for_python_harms_nobody():
    deep = "[" * 3000 + "]" * 3000
    text = f'<tool_call>{{"a": {deep}}}'
    assert read(reader("hermes"), [text]) == [Content(text)]
    text = f'<tool_call>{{"arguments": {{"a": {deep}}}, "name": "f"}}'
    assert read(reader("hermes"), [text]) == call("f", f'{{"a": {deep}}}')
    for value, expected in ((deep, f'{{"": {deep}}}'), (json.dumps(deep), f'{{"": "{deep}"}}')):
        text = f'<tool_call>{{"name": "f", "arguments": {value}}}</tool_call>'
        assert read(reader("hermes"), [text]) == call("f", expected)
    text = tagged("get_weather", place=deep)
    assert read(reader("qwen3_coder"), [text]) == call("get_weather", f'{{"place": "{deep}"}}')


# Fragments that have a meaning somewhere: their soup must be read the same however it is cut.


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    ),
    indent=st.sampled_from([None, 1]),
)
@settings(max_examples=examples(100))
def test_json_passes_as_it_is_and_ends_where_it_ends(value, indent):
    text, pieces = json.dumps(value, indent=indent), []
    source = Source()
    steps = ValueReader(source, pieces.append).read()
    for character in text + "; more":
        source.buffer += character
        next(steps, None)
    assert "".join(pieces) == text
    assert source.buffer == "; more"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{'a': 'it\\'s \"x\"', \"b\": 'c'}", '{"a": "it\'s \\"x\\"", "b": "c"}'),
        ("{a: True, b: None, c: (1, .5,), d: 0x1f}", '{"a": true, "b": null, "c": [1, 0.5], "d": 31}'),
        ('{"a": 1 "b": 2,}', '{"a": 1 , "b": 2}'),
        ("{a: {'x', 'y'}}", '{"a": ["x", "y"]}'),
        ('{"a": 1,, "b": 2,}', '{"a": 1, "b": 2}'),
        (
            "{a: Oslo Town, b: /tmp/x y, c: 5 Main Street }",
            '{"a": "Oslo Town", "b": "/tmp/x y", "c": "5 Main Street" }',
        ),
        ('{"a": "x\ny\td\\d"}', '{"a": "x\\ny\\td\\\\d"}'),
        ('{"a": [1, {"b": 2}', '{"a": [1, {"b": 2}]}'),
        ('{"a": [1, 2}', '{"a": [1, 2]}'),
        ('{"a": ', '{"a": null}'),
        ('{"a"', '{"a": null}'),
        ("{zip: 02134, v: 1.10}", '{"zip": "02134", "v": 1.10}'),
    ],
)
def test_what_is_nearly_json_becomes_json(text, expected):
    events = [CallStart("f"), CallArguments(expected)]
    assert read(reader("hermes"), [f'<tool_call>{{"name": "f", "arguments": {text}']) == events
    assert read(reader("hermes"), list(f'<tool_call>{{"name": "f", "arguments": {text}')) == events
    json.loads(expected)


def unique(pairs):
    assert len({key for key, _ in pairs}) == len(pairs)
    return dict(pairs)


NESTED = st.recursive(
    st.sampled_from(["1", "null", '""', '"a\\"b\\\\"', f'"{"y" * 80}"']),
    lambda values: (
        st.lists(values, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.lists(st.tuples(st.sampled_from(["a", "b", "\\u0061"]), values), max_size=4).map(
            lambda items: "{" + ", ".join(f'"{key}": {value}' for key, value in items) + "}"
        )
    ),
)


@given(values=st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), NESTED), max_size=5), size=st.integers(1, 9))
@settings(max_examples=examples(200))
def test_every_key_has_one_value_and_the_last_one_if_it_is_near(values, size):
    text = "{" + ", ".join(f'"{key}": {value}' for key, value in values) + "}"
    results = []
    for step in (size, len(text)):
        pieces = []
        keys = UniqueKeys(pieces.append)
        for start in range(0, len(text), step):
            keys.push(text[start : start + step])
        keys.finish()
        results.append("".join(pieces))
    assert results[0] == results[1]
    got = json.loads(results[0], object_pairs_hook=unique)
    if len(text) <= MAX_HELD:
        assert got == json.loads(text)


@pytest.mark.parametrize(
    "text", ['{"a": 1 ,\n "b" : [1, {"c": "}"} ] }', "{}", '{"a": {}, "b": [[]]}', '{"a": "\\\\"}']
)
def test_other_texts_pass_unchanged(text):
    for size in (1, 3, 100):
        pieces = []
        keys = UniqueKeys(pieces.append)
        for start in range(0, len(text), size):
            keys.push(text[start : start + size])
        assert "".join(pieces) == text


def test_what_is_long_is_passed_on_while_it_is_written():
    pieces = []
    keys = UniqueKeys(pieces.append)
    keys.push('{"a": "' + "x" * MAX_HELD)
    assert "".join(pieces) == '{"a": "' + "x" * MAX_HELD
    keys.push("y")
    assert pieces[-1] == "y"
    keys.push('", "a": 1, "b": 2}')
    assert "".join(pieces).endswith('y", "b": 2}')
