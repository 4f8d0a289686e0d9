"""The grammar of a schema: which texts it allows, which schemas are refused, and in which words."""

import json
import re

import jsonschema
import pytest
from byte_grammars import passes

from jaxserve.errors import InvalidRequest
from jaxserve.sampling_params import StructuredOutputs
from jaxserve.structured.grammar import JsonOptions, arguments_schema, make_grammar
from jaxserve.structured.schemas import followable


def writes(schema, text, **options):
    text_of_schema = schema if isinstance(schema, str) else json.dumps(schema)
    return passes(make_grammar(StructuredOutputs(json=text_of_schema, **options)), text)


def refusal(schema):
    with pytest.raises(InvalidRequest) as caught:
        make_grammar(StructuredOutputs(json=schema if isinstance(schema, str) else json.dumps(schema)))
    assert caught.value.param == "structured_outputs.json"
    return caught.value.message


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ('{"const": 9007199254740992}', ["9007199254740992"], ["9007199254740993", "9007199254740991"]),
        ('{"const": -9007199254740991}', ["-9007199254740991"], ["-9007199254740992"]),
        ('{"const": 1152921504606846976}', ["1152921504606846976"], ["1152921504606847000"]),
        ('{"const": 1000000000000000000}', ["1000000000000000000"], ["1000000000000000001"]),
        ('{"enum": [0.1, 1e-7, 2.5e3]}', ["0.1", "0.0000001", "2500"], ["0.2"]),
        ('{"type": "integer", "minimum": 9007199254740993}', ["9007199254740994"], ["9007199254740992"]),
        ('{"type": "integer", "exclusiveMinimum": 9007199254740992}', ["9007199254740994"], ["9007199254740992"]),
        ('{"type": "integer", "exclusiveMaximum": -9007199254740992}', ["-9007199254740994"], ["-9007199254740992"]),
        (
            '{"type": "integer", "minimum": -9223372036854775808, "maximum": 9223372036854775807}',
            ["-9223372036854774784", "9223372036854774784", "0", "1234567890123456789"],
            ["9223372036854775808", "-9223372036854775809"],
        ),
        (
            '{"type": "number", "maximum": 1152921504606846976}',
            ["1152921504606846000", "0.5", "-1000"],
            ["1152921504606847000", "1152921504606846977"],
        ),
        ('{"minimum": 0.1000000000000000055511151231257828}', ["0.2", '"a"'], ["0.1"]),
        ('{"type": "number", "minimum": 3, "exclusiveMinimum": true}', ["4", "3.5"], ["3"]),
        ('{"type": "number", "multipleOf": 0.01}', ["0.07", "1.2", "-3"], ["0.001"]),
        ('{"type": "integer", "multipleOf": 10000000}', ["960000000"], ["960000001"]),
        ('{"type": "number", "multipleOf": 0.33949672}', ["0.67899344"], ["0.67899345"]),
        ('{"type": "array", "minItems": 2.0, "maxItems": 1e1}', ["[1,2]"], ["[1]"]),
        ('{"type": "string", "maxLength": 18446744073709551615}', ['"a"'], ["1"]),
    ],
)
def test_numbers_that_are_followed(schema, right, wrong):
    assert [text for text in right if not writes(schema, text)] == []
    assert [text for text in wrong if writes(schema, text)] == []


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ('{"const": 9007199254740993}', ["const", "9007199254740993"]),
        ('{"const": -9223372036854775808}', ["const", "-9223372036854775808"]),
        ('{"enum": [9223372036854775808]}', ["enum", "9223372036854775808"]),
        ('{"properties": {"a": {"enum": [{"b": [18446744073709551615]}]}}}', ["enum", "#/properties/a"]),
        ('{"const": 0.1000000000000000000000001}', ["const", "0.1000000000000000000000001"]),
        ('{"const": 1e400}', ["1e400"]),
        ('{"default": 1e400}', ["1e400"]),
        ('{"minimum": -1e400}', ["-1e400"]),
        ('{"const": ' + "9" * 5000 + "}", ["digits"]),
        ('{"type": "integer", "maximum": 18446744073709551615}', ["maximum", "18446744073709551615"]),
        ('{"items": {"type": "number", "exclusiveMinimum": -1e300}}', ["exclusiveMinimum", "#/items"]),
        ('{"type": "integer", "exclusiveMaximum": -9223372036854775808}', ["exclusiveMaximum"]),
        ('{"multipleOf": 0}', ["multipleOf"]),
        ('{"multipleOf": 4294967295}', ["multipleOf", "4294967295"]),
        ('{"multipleOf": 1000003}', ["multipleOf", "1000003"]),
        ('{"multipleOf": 4294967296}', ["multipleOf", "4294967296"]),
        ('{"multipleOf": 1e-9}', ["multipleOf", "1e-9"]),
        ('{"multipleOf": 1e-300}', ["multipleOf"]),
        ('{"allOf": [{"multipleOf": 3000000}, {"multipleOf": 3500000}]}', ["multipleOf"]),
        ('{"type": "array", "minItems": 4294967296}', ["minItems"]),
        ('{"$defs": {"a": {"$anchor": "x", "const": 9007199254740993}}, "$ref": "#x"}', ["9007199254740993"]),
        ('{"$defs": {"a": {"$anchor": "x", "minimum": 9007199254740993}}, "$ref": "#x"}', ["minimum"]),
    ],
)
def test_numbers_that_are_refused(schema, words):
    message = refusal(schema)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("schema", ['{"const": 9007199254740993}', '{"enum": [1, 9223372036854775808]}'])
def test_numbers_in_a_callers_own_grammar_are_checked_too(schema):
    with pytest.raises(InvalidRequest, match="digits") as caught:
        make_grammar(StructuredOutputs(grammar=f'start: "a" %json {schema} "b"'))
    assert caught.value.param == "structured_outputs.grammar"
    grammar = make_grammar(StructuredOutputs(grammar='start: "%json {" %json {"const": 5} // %json {'))
    assert passes(grammar, "%json {5")


CLOSED = [
    {"properties": {"a": {}}},
    {"type": "object", "properties": {"a": {}}, "required": ["a"]},
    {"type": ["object", "null"], "properties": {"a": {}}},
    {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {}}}}},
    {"anyOf": [{"type": "object", "properties": {"a": {}}}, {"type": "null"}]},
    {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 1},
    {
        "oneOf": [
            {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]},
            {"type": "object", "properties": {"a": {"const": 2}}, "required": ["a"]},
        ]
    },
]


@pytest.mark.parametrize("schema", CLOSED, ids=str)
def test_objects_of_named_properties_are_closed(schema):
    for outer, wrap in ((schema, "{}"), ({"$defs": schema.get("$defs", {}), "type": "array", "items": schema}, "[{}]")):
        assert writes(outer, wrap.replace("{}", '{"a":1}'))
        assert not writes(outer, wrap.replace("{}", '{"a":1,"b":2}'))
        assert writes(outer, wrap.replace("{}", '{"a":1,"b":2}'), disable_additional_properties=False)
    assert not writes(schema, '{"a":1,"b":2}', disable_additional_properties=True)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "required": ["a"]},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^b": {}}},
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": True},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 2},
        {"type": "object", "properties": {"a": {}}, "allOf": [{"required": ["b"]}]},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "type": "object"},
        {"allOf": [{"properties": {"a": {}}}], "type": "object"},
        {"type": "object", "properties": {"a": {}}, "$ref": "#/$defs/x", "$defs": {"x": {"properties": {"b": {}}}}},
        {"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["b"]}, {"properties": {"b": {}}}]},
        {
            "allOf": [{"$ref": "#/$defs/x"}, {"properties": {"b": {}}}],
            "$defs": {"x": {"type": "object", "properties": {"a": {}}}},
        },
        {"enum": [{"a": 1, "b": 2}], "properties": {"a": {}}},
    ],
    ids=str,
)
def test_objects_stay_open_where_closing_could_leave_nothing(schema):
    jsonschema.validate({"a": 1, "b": 2}, schema)
    assert writes(schema, '{"a":1,"b":2}')
    assert followable(json.dumps(schema), is_closed=True) == followable(json.dumps(schema), is_closed=False)


def test_what_is_nested_in_a_combination_stays_open_too():
    inner = {"type": "object", "properties": {"x": {"type": "object", "properties": {"p": {}}}}}
    other = {"properties": {"x": {"properties": {"q": {}}, "required": ["q"]}}}
    assert writes({"allOf": [inner, other]}, '{"x":{"p":1,"q":2}}')


FORMATS = ["password", "byte", "binary", "path", "file-path", "directory-path", "int32", "int64", "float", "double"]
FORMATS += ["json-string", "base64url", "uuid4", "ipvanyaddress", "color", "decimal", "zip-code", "multi-host-uri"]


@pytest.mark.parametrize("name", FORMATS)
def test_formats_that_are_annotations(name):
    assert writes({"type": "string", "format": name}, '"anything"')
    assert writes({"type": "integer", "format": name}, "7")
    parameters = {"type": "object", "properties": {"a": {"type": "string", "format": name, "maxLength": 2}}}
    schema = arguments_schema(json.dumps(parameters), param="tools", options=JsonOptions())
    assert not passes(json.dumps({"grammars": [{"json_schema": json.loads(schema)}]}), '{"a":"abc"}')


@pytest.mark.parametrize("name", ["iri", "uri-reference", "json-pointer", "regex", "idn-email"])
def test_formats_of_json_schema_that_cannot_be_followed_are_refused(name):
    assert f"'{name}'" in refusal({"properties": {"a": {"type": "string", "format": name}}})
    assert writes({"type": "integer", "format": name}, "7")


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"'], ["null"]),
        (
            {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"type": "array"}}},
            ["[]", "null"],
            ["1"],
        ),
        ({"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 5}]}, ["3", "5"], ["4"]),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": ["1", 3]}]}, ["1", '"1"', "3"], ["4"]),
        (
            {
                "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
                "$defs": {
                    name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}
                    for name in ("cat", "dog")
                },
            },
            ['{"kind":"cat"}', '{"kind":"dog"}'],
            ['{"kind":"cow"}', '{"kind":"cat","more":1}'],
        ),
        ({"not": {"type": "string"}, "type": ["string", "null", "integer"]}, ["null", "3"], ['"a"']),
        ({"not": {"type": ["object", "array"]}}, ["null", "3", "1.5", '"a"'], ["{}", "[]"]),
        ({"not": {"type": "number"}}, ["null"], ["1", "1.5"]),
        ({"enum": [1, 2, True, "a"], "not": {"enum": [1, "a"]}}, ["2", "true"], ["1", '"a"']),
        ({"enum": [1, 2], "not": {"const": 1.0}}, ["2"], ["1"]),
        ({"not": False, "type": "null"}, ["null"], ["1"]),
        ({"if": {"type": "string"}, "type": "null"}, ["null"], ["1"]),
        ({"type": "array", "uniqueItems": False, "items": {"type": "null"}}, ["[null,null]"], ["[1]"]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1,1]"]),
        ({"type": "object", "unevaluatedProperties": False, "properties": {"a": {}}}, ['{"a":1}'], ['{"b":1}']),
    ],
    ids=str,
)
def test_combinations_that_are_followed(schema, right, wrong):
    for text in right:
        jsonschema.validate(json.loads(text), schema)
        assert writes(schema, text), text
    for text in wrong:
        assert not writes(schema, text), text


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}, ["'oneOf'"]),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, ["'oneOf'"]),
        ({"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}, "required": ["b"]}]}, ["'oneOf'"]),
        ({"items": {"not": {"minLength": 2}}}, ["'not'", "#/items"]),
        ({"not": {}}, ["'not'"]),
        ({"type": "null", "not": {"type": "null"}}, ["'not'"]),
        ({"not": {"type": "integer"}}, ["'not'"]),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, ["'uniqueItems'", "#/properties/a"]),
        ({"anyOf": [{"contains": {"const": 1}}]}, ["'contains'", "#/anyOf/0"]),
        ({"if": {}, "else": {"required": ["a"]}}, ["'if'"]),
        ({"$dynamicRef": "#a"}, ["'$dynamicRef'"]),
        ({"items": 5}, ["#/items"]),
    ],
    ids=str,
)
def test_refusals_are_in_our_words(schema, words):
    message = refusal(schema)
    assert [word for word in words if word not in message] == []
    assert not re.search("coerce_one_of|Unimplemented|lenient", message)


@pytest.mark.parametrize(
    ("parameters", "right", "wrong"),
    [
        ({}, ["{}", '{"a":1}'], ["1", "null", "[]", '"Bowtwiver"']),
        ({"description": "d"}, ["{}"], ["1"]),
        ({"properties": {"a": {"type": "integer"}}}, ["{}", '{"a":1}'], ["1", '{"b":1}']),
        ({"type": "object", "properties": {}}, ["{}"], ['{"a":1}']),
        ({"type": ["object", "null"]}, ["{}"], ["null"]),
        ({"anyOf": [{"type": "object"}, {"type": "string"}]}, ["{}"], ['"a"']),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"x": {"type": "null"}}}}}, ['{"x":null}'], ["1"]),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}}}},
            ['{"x":{"x":{}}}'],
            ["1", '{"y":1}'],
        ),
    ],
    ids=str,
)
def test_arguments_are_objects(parameters, right, wrong):
    schema = arguments_schema(json.dumps(parameters), param="tools[0]", options=JsonOptions())
    grammar = json.dumps({"grammars": [{"json_schema": json.loads(schema)}]})
    assert [text for text in right if not passes(grammar, text)] == []
    assert [text for text in wrong if passes(grammar, text)] == []


@pytest.mark.parametrize("parameters", [{"type": "string"}, {"type": ["null", "array"]}, {"const": 1}, {"type": 5}])
def test_parameters_that_allow_no_object_are_refused(parameters):
    with pytest.raises(InvalidRequest) as caught:
        arguments_schema(json.dumps(parameters), param="tools[0]", options=JsonOptions())
    assert caught.value.param == "tools[0]"


@pytest.mark.parametrize(
    ("options", "right", "wrong"),
    [
        ({}, ['{"a":1}', '{ "a": 1 }', '{\n  "a": 1\n}'], ['{"a":  1}']),
        ({"disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}', '{ "a":1}']),
        ({"whitespace_pattern": r"[\n\t ]*"}, ['{"a":1}', '{\t\t"a":  1}'], ['{\r"a":1}']),
        ({"whitespace_pattern": " ?"}, ['{"a": 1}'], ['{"a":  1}', '{\n"a":1}']),
        ({"whitespace_pattern": r"\s{2}|(?:\x20)"}, ['{"a": 1}', '{\t\r"a":1}'], ['{\n"a":1}', '{\x0b\x0b"a":1}']),
    ],
)
def test_white_space(options, right, wrong):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert [text for text in right if not writes(schema, text, **options)] == []
    assert [text for text in wrong if writes(schema, text, **options)] == []
    grammar = make_grammar(StructuredOutputs(json_object=True, **options))
    assert [text for text in right if not passes(grammar, text)] == []


@pytest.mark.parametrize("pattern", ["x", ".*", r"\S", "[a ]*", "[^a]", r"\n(", "(?i)a", r"\w", "[ ", r"\x61", ""])
def test_white_space_that_is_none(pattern):
    with pytest.raises(InvalidRequest):
        make_grammar(StructuredOutputs(json={"type": "array"}, whitespace_pattern=pattern))


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ("start[max_tokens=5]: /[a-z]+/", ["abc"], ["A"]),
        ('start: part\npart[capture="x"]: /[a-z]+/', ["abc"], ["A"]),
        ('start : "::=" item\nitem: "a"', ["::=a"], ["a"]),
        ('item: "::="\nstart: item item', ["::=::="], ["::="]),
        ('%ignore / +/\nstart: "a" "b"', ["ab", "a b"], ["b"]),
        ('?start: _x\n_x: "a"', ["a"], ["b"]),
        ('root ::= "a: b" [c-d]', ["a: bc"], ["a"]),
        ('# start: "x"\nroot ::= "a"', ["a"], ["x"]),
    ],
)
def test_lark_is_distinguished_from_gbnf(grammar, right, wrong):
    text = make_grammar(StructuredOutputs(grammar=grammar))
    assert [it for it in right if not passes(text, it)] == []
    assert [it for it in wrong if passes(text, it)] == []
