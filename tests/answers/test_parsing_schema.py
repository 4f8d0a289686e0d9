"""Values that models write without quotes follow the tool's schema, however it specifies their types."""

import json

import pytest
from written_answers import Message, loaded, read, reader, rows

from jaxserve.answers.literals.schema import json_value, property_kind

DEFS = {
    "Zip": {"type": "string"},
    "Wrapped": {"allOf": [{"$ref": "#/$defs/Zip"}, {"description": "A code."}]},
    "Maybe": {"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]},
    "Count": {"oneOf": [{"type": "integer"}, {"type": "null"}]},
}


def of(schema):
    return {"type": "object", "properties": {"x": schema}, "$defs": DEFS}


# (the tool's parameters, what the model wrote for x, its JSON)
CASES = [
    # A text stays one, whatever it looks like.
    (of({"type": "string"}), "10115", '"10115"'),
    (of({"type": "string"}), "02134", '"02134"'),
    (of({"type": "string"}), "true", '"true"'),
    (of({"$ref": "#/$defs/Zip"}), "10115", '"10115"'),
    (of({"$ref": "#/$defs/Wrapped"}), "10115", '"10115"'),
    (of({"allOf": [{"$ref": "#/$defs/Wrapped"}]}), "10115", '"10115"'),
    (of({"$ref": "#/$defs/Maybe"}), "10115", '"10115"'),
    (of({"$ref": "#/$defs/Maybe"}), "null", "null"),
    ({"$ref": "#/$defs/All", "$defs": DEFS | {"All": of({"$ref": "#/$defs/Zip"})}}, "10115", '"10115"'),
    ({"allOf": [of({"type": "string"})]}, "10115", '"10115"'),
    ({"anyOf": [of({"type": "string"}), {"type": "null"}]}, "7", '"7"'),
    ({"additionalProperties": {"type": "string"}}, "7", '"7"'),
    ({"patternProperties": {"^x": {"type": "string"}}, "additionalProperties": {"type": "integer"}}, "7", '"7"'),
    ({"patternProperties": {"^y": {"type": "string"}}, "additionalProperties": {"type": "integer"}}, "7", "7"),
    (of({"type": "str"}), "7", '"7"'),
    # Without a type it stays a text.
    ({}, "10115", '"10115"'),
    ({}, "02134", '"02134"'),
    ({}, "True", '"True"'),
    (of({}), '{"a": 1}', '"{\\"a\\": 1}"'),
    (of({"type": "colour"}), "7", '"7"'),
    # Numbers.
    (of({"type": "integer"}), "3", "3"),
    (of({"type": "integer"}), '"3"', "3"),
    (of({"type": "integer"}), " 3\n", "3"),
    (of({"type": "integer"}), "3.0", "3"),
    (of({"type": "integer"}), "many", '"many"'),
    (of({"type": "integer"}), "9007199254740993", "9007199254740993"),
    (of({"type": "int"}), "3", "3"),
    (of({"$ref": "#/$defs/Count"}), "3", "3"),
    (of({"$ref": "#/$defs/Count"}), "None", "null"),
    (of({"type": ["integer", "null"]}), "null", "null"),
    (of({"type": "number"}), "1.10", "1.10"),
    (of({"type": "number"}), "'2.5'", "2.5"),
    (of({"type": "float"}), "2", "2"),
    (of({"type": "number"}), "NaN", '"NaN"'),
    (of({"type": "number"}), "1e999", '"1e999"'),
    # Booleans.
    (of({"type": "boolean"}), "TRUE", "true"),
    (of({"type": "boolean"}), "1", "true"),
    (of({"type": "boolean"}), "False", "false"),
    (of({"type": "boolean"}), "0", "false"),
    (of({"type": "boolean"}), '"true"', "true"),
    (of({"type": "bool"}), "true", "true"),
    (of({"type": ["integer", "boolean"]}), "1", "1"),
    # Lists and objects, in JSON and in Python.
    (of({"type": "array"}), "[1, 'a', None, True]", '[1, "a", null, true]'),
    (of({"type": "list"}), '["a"]', '["a"]'),
    (of({"type": "array"}), '"[1, 2]"', "[1, 2]"),
    (of({"type": "object"}), "{'a': {'b': (1, 2)}}", '{"a": {"b": [1, 2]}}'),
    (of({"type": "dict"}), "{}", "{}"),
    (of({"properties": {"a": {"type": "integer"}}}), '{"a": 1}', '{"a": 1}'),
    (of({"anyOf": [{"type": "array"}, {"type": "string"}]}), "[1]", "[1]"),
    (of({"anyOf": [{"type": "array"}, {"type": "string"}]}), "one", '"one"'),
    # Listed values.
    (of({"enum": ["1", "2"]}), "1", '"1"'),
    (of({"enum": [1, 2]}), "1", "1"),
    (of({"enum": ["1", 2]}), "1", '"1"'),
    (of({"enum": ["1", 2]}), "2", "2"),
    (of({"enum": [True, "auto"]}), "True", "true"),
    (of({"enum": [True, "auto"]}), "auto", '"auto"'),
    (of({"enum": ["a", None]}), "null", "null"),
    (of({"const": 1.5}), "1.5", "1.5"),
    (of({"type": "string", "enum": ["C", "F"]}), "F", '"F"'),
]


@pytest.mark.parametrize(("schema", "text", "expected"), CASES)
def test_a_value_follows_the_schema(schema, text, expected):
    assert json_value(text, property_kind(schema, "x")) == expected


@pytest.mark.parametrize(("schema", "text", "expected"), CASES)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "seed_oss"])
def test_between_tags_it_does_too(name, schema, text, expected):
    row = rows()[name]
    tags = row.arguments
    value = text if tags.value[1].startswith("\n") else text.strip("\n")
    written = row.section[0] + row.call[0] + row.name[0] + "f" + row.name[1]
    written += f"{tags.key[0]}x{tags.key[1]}{tags.value[0]}{value}{tags.value[1]}{row.call[1]}{row.section[1]}"
    got = read(reader(row, {"f": schema}), list(written))
    assert got == Message("", (("f", f'{{"x": {expected}}}'),))


@pytest.mark.parametrize(("value", "expected"), [('"3"', 3), ("3", 3), ('"TRUE"', "TRUE"), ('"x"', "x")])
def test_a_text_in_json_becomes_the_number_that_is_wanted(value, expected):
    text = f'<tool_call>{{"name": "f", "arguments": {{"x": {value}}}}}</tool_call>'
    assert loaded(read(reader(rows()["hermes"], {"f": of({"type": "integer"})}), list(text))).calls == (
        ("f", {"x": expected}),
    )


def test_a_pattern_that_takes_for_ever_matches_nothing():
    schema = {"patternProperties": {"(a+)+$": {"type": "string"}}}
    assert property_kind(schema, "a" * 60 + "b").types == frozenset()
    assert json.loads(json_value("7", property_kind(schema, "aa"))) == "7"
