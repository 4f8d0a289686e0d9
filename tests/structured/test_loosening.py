"""Schemas that are not strict: what no grammar can follow is left out and named, and the rest still holds."""

import copy
import json
import random
import re

import json_schemas
import jsonschema
import pytest
from byte_grammars import matcher, passes

from jaxserve.errors import InvalidRequest
from jaxserve.sampling_params import StructuredOutputs
from jaxserve.structured.grammar import JsonOptions, arguments_schema, make_grammar

COMMON = b'"}],:{[0123456789abcdefghijklmnopqrstuvwxyz-_.@/'
PASSWORD = r"^(?=.*\d)(?=.*[a-z]).{8,}$"
KIND_IS_P = {"properties": {"k": {"const": "p"}}}
KINDS = {"type": "string", "enum": ["p", "q", "r"]}


def loosen(schema, **options):
    """Return the grammar of a schema that is not strict, and what was left out of it."""
    left_out = []
    constraint = StructuredOutputs(json=json.dumps(schema), **options)
    return make_grammar(constraint, left_out=left_out), left_out


def written(grammar, *, seed, num_bytes=400):
    """Return a random text of a grammar, None if it does not end soon."""
    rng, one, text = random.Random(seed), matcher(grammar), []
    while len(text) < num_bytes:
        if one.is_accepting() and (one.is_stopped() or rng.random() < 0.5):
            return bytes(text).decode()
        mask = one.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        if not allowed:
            return None
        common = [byte for byte in (COMMON[:4] if len(text) > 100 else COMMON) if byte in allowed]
        text.append(rng.choice(common or allowed))
        assert one.consume_token(text[-1])
    return None


def without(schema, left_out):
    """Return a schema without what was left out of it."""
    schema = copy.deepcopy(schema)
    for what in left_out:
        keyword, path = re.match(r"'(.*?)' at #/?([^,]*)", what).groups()
        part = schema
        for step in path.split("/") if path else ():
            name = "oneOf" if step == "anyOf" and "anyOf" not in part else step
            part = part[int(step) if isinstance(part, list) else name]
        value = part.pop(keyword)
        if keyword == "oneOf":
            part |= {"allOf": [*part.get("allOf", []), {"anyOf": value}]} if "anyOf" in part else {"anyOf": value}
        for word in {"if": ("then", "else"), "contains": ("minContains", "maxContains")}.get(keyword, ()):
            part.pop(word, None)
    return schema


def satisfies(text, schema):
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


def properties(**named):
    return {"type": "object", "properties": named}


FOLLOWED = [
    (
        {**properties(a={"type": "string"}, b={"type": "integer"}), "dependentRequired": {"a": ["b"]}},
        ["{}", '{"b":1}', '{"a":"","b":1}'],
        ['{"a":""}', '{"b":1,"c":2}'],
    ),
    (
        {**properties(a={"type": "null"}), "dependentSchemas": {"a": {"properties": {"c": {"type": "null"}}}}},
        ["{}", '{"a":null}', '{"c":1}', '{"a":null,"c":null}'],
        ['{"a":null,"c":1}'],
    ),
    ({**properties(a={}, b={}), "dependencies": {"a": ["b"]}}, ["{}", '{"a":1,"b":1}'], ['{"a":1}']),
    (
        {
            **properties(k=KINDS, v={"type": "null"}),
            "if": {"properties": {"k": {"const": "p"}}},
            "then": {"required": ["v"]},
        },
        ['{"v":null}', '{"k":"q"}', '{"k":"p","v":null}'],
        ["{}", '{"k":"p"}', '{"k":"q","w":1}'],
    ),
    (
        {
            **properties(k=KINDS, v={"type": "integer"}),
            "if": {"properties": {"k": {"enum": ["p", "q"]}}, "required": ["k"]},
            "then": {"required": ["v"]},
            "else": {"properties": {"v": {"maximum": 3}}},
        },
        ["{}", '{"v":3}', '{"k":"p","v":9}', '{"k":"r","v":2}'],
        ['{"v":9}', '{"k":"q"}', '{"k":"r","v":4}'],
    ),
    (
        {
            **properties(on={"type": "boolean"}, v={"type": "null"}, w={"type": "null"}),
            "required": ["on"],
            "allOf": [
                {"if": {"properties": {"on": {"const": True}}}, "then": {"required": ["v"]}},
                {"if": {"properties": {"on": {"const": False}}}, "then": {"required": ["w"]}},
                {"if": {"required": ["v"]}, "then": {"required": ["w"]}},
            ],
        },
        ['{"on":true,"v":null,"w":null}', '{"on":false,"w":null}'],
        ['{"on":true,"v":null}', '{"on":false}', '{"on":false,"w":null,"x":1}'],
    ),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        ["{}", '{"b":1}'],
        ['{"c":1}', '{"a":""}'],
    ),
    (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "null"}},
        ["{}", '{"ab":null}'],
        ['{"A":null}', '{"a":1}'],
    ),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, ['{"ab":1}'], ['{"abc":1}']),
    ({**properties(a={}, b={}), "propertyNames": {"enum": ["a"]}}, ['{"a":1}'], ['{"b":1}']),
    ({**properties(a={}, b={}, c={}), "minProperties": 1}, ['{"a":1}', '{"a":1,"c":1}'], ["{}", '{"d":1}']),
    ({**properties(a={}, b={}), "required": ["a"], "minProperties": 2}, ['{"a":1,"b":2}'], ['{"a":1}']),
    ({**properties(a={}, b={}), "required": ["a"], "minProperties": 1, "maxProperties": 2}, ['{"a":1}'], ["{}"]),
    ({"type": "array", "contains": {}, "maxContains": 2}, ["[1]", "[1,2]"], ["[]", "[1,2,3]"]),
    (
        {
            **properties(
                a={"anyOf": [{"type": "string"}, {"type": "null"}], "oneOf": [{"const": "x"}, {"const": None}]}
            ),
            "required": ["a"],
        },
        ['{"a":"x"}', '{"a":null}'],
        ['{"a":"y"}'],
    ),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), FOLLOWED, ids=str)
def test_keywords_about_other_properties_are_followed_exactly(schema, right, wrong):
    grammar = make_grammar(StructuredOutputs(json=json.dumps(schema)))
    assert [text for text in right if not passes(grammar, text)] == []
    assert [text for text in wrong if passes(grammar, text)] == []
    if "dependencies" not in schema:
        texts = [text for seed in range(20) if (text := written(grammar, seed=seed)) is not None]
        assert texts
        assert [text for text in texts if not satisfies(text, schema)] == []


LEFT_OUT = [
    (properties(a={"type": "array", "items": {"type": "null"}, "uniqueItems": True}), "uniqueItems", '{"a":[1]}'),
    (properties(a={"type": "array", "contains": {"const": 1}, "maxItems": 2}), "contains", '{"a":[1,1,1]}'),
    ({"type": "object", "propertyNames": {"format": "uuid"}, "minProperties": 1}, "propertyNames", "{}"),
    ({**properties(a={"type": "null"}, b={}), "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "oneOf", "{}"),
    (properties(a={"oneOf": [{"type": "number"}, {"type": "integer"}]}), "oneOf", '{"a":""}'),
    (properties(a={"anyOf": [{}], "oneOf": [{"maxLength": 3}, {"maxLength": 2}]}), "oneOf", '{"a":"1234"}'),
    *((properties(a={"type": "string", "format": name}), "format", '{"a":1}') for name in ("regex", "iri")),
    ({**properties(a={}, b={}, c={}), "minProperties": 2}, "minProperties", '{"d":1}'),
    ({**properties(a={}, b={}, c={}), "maxProperties": 2}, "maxProperties", '{"d":1}'),
    ({**properties(k={"type": "string"}), "if": KIND_IS_P, "else": {"required": ["v"]}}, "if", '{"k":1}'),
    (properties(a={"type": "string", "not": {"pattern": "^x"}}), "not", '{"a":1}'),
    ({"allOf": [properties(a={"type": "null"})], "unevaluatedProperties": False}, "unevaluatedProperties", '{"a":1}'),
    ({"type": "object", "patternProperties": {"^a": {}, "a$": {}}, "minProperties": 1}, "patternProperties", "{}"),
    (properties(a={"$ref": "https://example.org/a.json"}, b={"type": "null"}), "$ref", '{"b":1}'),
    (properties(a={"$ref": "#/components/A"}, b={"type": "null"}), "$ref", '{"b":1}'),
    (properties(a={"$ref": "#", "properties": {"b": {"type": "null"}}, "type": "object"}), "$ref", '{"a":{"b":1}}'),
    ({"$dynamicAnchor": "n", **properties(a={"$dynamicRef": "#n"}, b={"type": "null"})}, "$dynamicRef", '{"b":1}'),
    ({"$schema": "https://example.org/dialect", **properties(a={"type": "null"})}, "$schema", '{"a":1}'),
    *(
        (properties(a={"type": "string", "pattern": pattern, "maxLength": 9}), "pattern", '{"a":"0123456789"}')
        for pattern in (PASSWORD, r"^(a)\1$", r"\bword\b", "[")
    ),
    (properties(a={"type": "integer", "minimum": 0, "maximum": 2**64 - 1}), "maximum", '{"a":-1}'),
    (properties(a={"type": "number", "multipleOf": 1e-9, "maximum": 3}), "multipleOf", '{"a":4}'),
    (properties(a={"type": "integer", "const": 2**53 + 1}), "const", '{"a":""}'),
    (
        properties(a={"$id": "https://example.org/a", "type": "array", "uniqueItems": True, "items": {"type": "null"}}),
        "uniqueItems",
        '{"a":[1]}',
    ),
    ({**properties(a={"$ref": "#x"}), "$defs": {"x": {"$anchor": "x", "uniqueItems": True}}}, "$ref", "[]"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "keyword", "wrong"), LEFT_OUT, ids=str)
def test_what_no_grammar_can_follow_is_left_out_and_named_and_the_rest_holds(schema, keyword, wrong):
    with pytest.raises(InvalidRequest) as refused:
        make_grammar(StructuredOutputs(json=json.dumps(schema)))
    assert refused.value.code == "unsupported_grammar"
    grammar, left_out = loosen(schema)
    assert [what.split("'")[1] for what in left_out] == [keyword]
    assert not passes(grammar, wrong)
    texts = [text for seed in range(20) if (text := written(grammar, seed=seed)) is not None]
    assert texts
    for text in texts:
        assert satisfies(text, without(schema, left_out)), text


def test_of_many_patterns_only_those_that_cannot_be_followed_are_left_out():
    names = [f"p{index}" for index in range(40)]
    schema = properties(**{name: {"type": "string", "pattern": f"^{name}$"} for name in names})
    for name in ("p3", "p17", "p18"):
        schema["properties"][name]["pattern"] = PASSWORD
    grammar, left_out = loosen(schema)
    assert sorted(left_out) == [f"'pattern' at #/properties/{name}" for name in ("p17", "p18", "p3")]
    assert passes(grammar, '{"p4":"p4","p17":"x"}')
    assert not passes(grammar, '{"p4":"p5"}')


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        (properties(a={"type": "banana"}), "banana"),
        ({"type": "object", "properties": []}, "properties"),
        (properties(a={}) | {"required": None}, "required"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "nothing satisfies"),
        ({"not": {}}, "nothing satisfies"),
        (properties(a={"multipleOf": 0}), "multipleOf"),
        (properties(a={"type": "string", "pattern": PASSWORD}, b={"type": "strin"}), "strin"),
    ],
)
def test_what_is_malformed_or_contradicts_itself_is_refused_all_the_same(schema, word):
    with pytest.raises(InvalidRequest, match=word):
        loosen(schema)


@pytest.mark.parametrize("is_closed", [True, False])
def test_an_object_stays_open_where_what_is_left_out_names_more_properties(is_closed):
    condition = {"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}}
    options = JsonOptions(is_closed=is_closed)
    for named, text, is_open in (
        ({"a": {}}, '{"a":1,"b":2}', True),
        ({"a": {}, "b": {}}, '{"a":1,"c":2}', not is_closed),
    ):
        left_out = []
        schema = arguments_schema(
            json.dumps(properties(**named) | condition), param="tools", options=options, left_out=left_out
        )
        assert left_out == ["'if' at #"]
        assert passes(json.dumps({"grammars": [{"json_schema": json.loads(schema)}]}), text) == is_open


EXTRAS = {
    "array": [{"uniqueItems": True}, {"contains": {"type": "integer"}}],
    "object": [
        {"propertyNames": {"not": {"const": "a"}}},
        {"minProperties": 2},
        {"not": {"required": ["a", "b"]}},
        {"unevaluatedProperties": False, "anyOf": [{}]},
        {"dependentRequired": {"a": ["b"], "name": ["age"]}},
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"oneOf": [{"required": ["a"]}, {"minProperties": 1}]},
    ],
    "string": [{"pattern": PASSWORD}, {"format": "regex"}, {"not": {"const": "x"}}],
    "integer": [{"multipleOf": 1e-12}, {"oneOf": [{"minimum": 2}, {"maximum": 8}]}, {"not": {"multipleOf": 3}}],
}


def with_extras(schema, rng):
    """Return a schema to some of whose parts keywords have been added that may or may not be followed."""
    if isinstance(schema, list):
        return [with_extras(each, rng) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = ("const", "enum", "required")
    made = {key: each if key in plain else with_extras(each, rng) for key, each in schema.items()}
    kind = made.get("type")
    if isinstance(kind, str) and kind in EXTRAS and rng.random() < 0.4:
        made = {**rng.choice(EXTRAS[kind]), **made}
    return made


def test_random_schemas_with_more_than_can_be_followed():
    rng = random.Random(7)
    num_texts = num_loosened = 0
    for index in range(60):
        schema = with_extras(json_schemas.random_schema(rng), rng)
        try:
            grammar, left_out = loosen(schema)
        except InvalidRequest:  # nothing satisfies it
            continue
        num_loosened += bool(left_out)
        for seed in range(3):
            if (text := written(grammar, seed=index + seed)) is not None:
                num_texts += 1
                assert satisfies(text, without(schema, left_out)), (schema, text)
    assert num_texts > 60
    assert num_loosened > 10
