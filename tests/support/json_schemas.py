"""JSON schemas to hold outputs against: a list by hand, keyword by keyword, and a generator."""

import random

WORDS = ["alpha", "beta", "gamma", "delta", "naïve", 'quo"te', "back\\slash", "tab\tnew\nline", "漢字", "🦙", "", " "]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}

BY_HAND = [
    # types
    *({"type": kind} for kind in ("null", "boolean", "integer", "number", "string", "array", "object")),
    *(
        {"type": list(kinds)}
        for kinds in (("null", "integer"), ("string", "boolean"), ("array", "null"), ("object", "null"))
    ),
    {},
    True,
    # const and enum
    *(
        {"const": value}
        for value in (None, True, 0, -1.5, "x", 'say "hi"\n', "漢字", [], [1, "a", None], {"a": {"b": [1]}})
    ),
    {"enum": [1, "1", None, True, 1.5]},
    {"enum": ["red", "green", "blue"]},
    {"enum": WORDS},
    {"enum": [{"a": 1}, {"a": 2}, [1, 2]]},
    {"type": "string", "enum": ["a", "b"]},
    {"type": "integer", "enum": [3, 5]},
    # numbers
    {"type": "integer", "minimum": 0, "maximum": 9},
    {"type": "integer", "minimum": -120, "maximum": -7},
    {"type": "integer", "minimum": -5, "maximum": 1234},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    {"type": "integer", "minimum": 1000},
    {"type": "integer", "maximum": -1000},
    {"type": "integer", "multipleOf": 7},
    {"type": "integer", "multipleOf": 5, "minimum": 13, "maximum": 99},
    {"type": "number", "minimum": 0.5, "maximum": 2.25},
    {"type": "number", "minimum": -1.5, "maximum": -0.25},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "minimum": 0},
    {"type": "number", "maximum": 0},
    {"type": "number", "multipleOf": 0.5},
    {"minimum": 3, "type": ["integer", "string"]},
    # strings
    {"type": "string", "maxLength": 5},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "minLength": 8},
    {"type": "string", "maxLength": 0},
    {"type": "string", "pattern": "^[a-z]{2,4}$"},
    {"type": "string", "pattern": "^(\\d{3}-)?\\d{4}$"},
    {"type": "string", "pattern": "[0-9]{2}"},
    {"type": "string", "pattern": '^[^"\\\\]{1,3}$'},
    {"type": "string", "pattern": "^(foo|bar|baz)+$", "maxLength": 9},
    {"type": "string", "pattern": "^\\w+\\s\\w+$", "minLength": 5, "maxLength": 12},
    {"type": "string", "pattern": "^(?:[A-F0-9]{2}:){3}[A-F0-9]{2}$"},
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "ipv4", "ipv6", "uuid", "email")),
    # arrays
    {"type": "array", "items": {"type": "integer"}},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
    {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    {"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 3},
    {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"const": "x"}], "items": False},
    {"type": "array", "prefixItems": [{"type": "boolean"}], "items": {"type": "null"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "minItems": 1},
    {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 2},
    {"type": "array", "items": False},
    {"type": "array", "maxItems": 0},
    # objects
    PERSON,
    {"type": "object", "properties": {"a": {"type": "integer"}}},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 2},
    {"type": "object", "additionalProperties": False},
    {"type": "object", "required": ["needed"]},
    {"type": "object", "required": ["needed"], "additionalProperties": {"type": "null"}, "maxProperties": 2},
    {"type": "object", "properties": {"a": True, "b": False}, "additionalProperties": False},
    {"type": "object", "properties": {word: {"type": "null"} for word in WORDS}, "required": WORDS[4:8]},
    {"type": "object", "patternProperties": {"^x_[a-c]{1,3}$": {"type": "integer"}}, "additionalProperties": False},
    {
        "type": "object",
        "properties": {"id": {"type": "integer"}},
        "patternProperties": {"^s_": {"type": "boolean"}},
        "additionalProperties": {"type": "null"},
        "required": ["id"],
    },
    {"properties": {"a": {"type": "integer"}}, "type": ["object", "null"], "additionalProperties": False},
    {"type": "object", "properties": {"deep": {"type": "object", "properties": {"er": PERSON}, "required": ["er"]}}},
    # combinations
    {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
    {"anyOf": [PERSON, {"type": "null"}]},
    {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 2, "maxLength": 6}]},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 4}]},
    {"oneOf": [{"const": "a"}, {"const": "b"}, {"type": "null"}]},
    {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
                "required": ["kind"],
            },
            {
                "type": "object",
                "properties": {"kind": {"const": "dog"}, "good": {"type": "boolean"}},
                "required": ["kind"],
            },
        ]
    },
    {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 8}]},
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    {
        "allOf": [
            {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "null"}]},
        ]
    },
    {
        "type": "object",
        "properties": {"v": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}},
        "required": ["v"],
    },
    {"type": "object", "propertyNames": {"pattern": "^a"}, "maxProperties": 2},
    {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
    {"type": "object", "properties": {"a": {}, "b": {}}, "dependentSchemas": {"a": {"required": ["b"]}}},
    {
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "a": {"type": "null"}},
        "if": {"properties": {"on": {"const": True}}},
        "then": {"required": ["a"]},
    },
    # references
    {"$defs": {"p": PERSON}, "$ref": "#/$defs/p"},
    {"definitions": {"p": PERSON}, "type": "array", "items": {"$ref": "#/definitions/p"}, "maxItems": 2, "minItems": 1},
    {
        "$defs": {"s": {"type": "string", "maxLength": 3}},
        "type": "object",
        "additionalProperties": {"$ref": "#/$defs/s"},
    },
    {"$defs": {"a~b/c": {"type": "null"}}, "$ref": "#/$defs/a~0b~1c"},
    TREE,
    {
        "$defs": {
            "l": {
                "anyOf": [
                    {"type": "null"},
                    {
                        "type": "object",
                        "properties": {"next": {"$ref": "#/$defs/l"}},
                        "required": ["next"],
                        "additionalProperties": False,
                    },
                ]
            }
        },
        "$ref": "#/$defs/l",
    },
    # words without a meaning for the text
    {
        "title": "T",
        "description": "d",
        "$comment": "c",
        "default": 3,
        "examples": [1],
        "type": "integer",
        "deprecated": True,
    },
    {"$anchor": "here", "$id": "urn:x", "type": "boolean"},
]

# What is not supported, and the word that the refusal must contain.
UNSUPPORTED = [
    ({"not": {"pattern": "^a"}}, "not"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if"),
    ({"type": "object", "propertyNames": {"format": "uuid"}}, "propertyNames"),
    ({"type": "object", "dependentRequired": 5}, "dependentRequired"),
    ({"anyOf": [{"required": ["a"]}], "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "string", "format": "uri-reference"}, "uri-reference"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "string", "pattern": "(a)\\1"}, "backreferences"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"type": "text"}, "text"),
    ({"$ref": "#/$defs/nowhere"}, "nowhere"),
    ({"$ref": "urn:elsewhere"}, "urn:elsewhere"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "nothing satisfies it"),
    ({"enum": []}, "nothing satisfies it"),
    (False, "false"),
    ({"$ref": "#"}, "satisfies"),
]


def random_schema(rng: random.Random, depth: int = 0):
    """Return a schema that some value satisfies."""
    kinds = ["null", "boolean", "integer", "number", "string", "enum", "const"]
    if depth < 3:
        kinds += ["array", "object", "object", "anyOf", "tuple"]
    kind = rng.choice(kinds)
    match kind:
        case "integer":
            low = rng.randint(-2000, 2000)
            return {"type": "integer"} | _some(rng, {"minimum": low, "maximum": low + rng.randint(0, 3000)})
        case "number":
            low = round(rng.uniform(-50, 50), rng.randint(0, 3))
            return {"type": "number"} | _some(rng, {"minimum": low, "maximum": low + rng.choice([0.5, 1, 10, 1000])})
        case "string":
            shortest = rng.randint(0, 6)
            bounds = {"minLength": shortest, "maxLength": shortest + rng.randint(0, 10)}
            pattern = {"pattern": rng.choice(["^[a-f]+$", "^\\d{1,4}$", "^[A-Z][a-z]* ?$", "ab|cd", "^(é|漢|x){2}$"])}
            return {"type": "string"} | (rng.choice([bounds, pattern]) if rng.random() < 0.8 else {})
        case "enum":
            return {"enum": rng.sample([*WORDS, 1, -2.5, None, True, [1], {"k": "v"}], rng.randint(1, 6))}
        case "const":
            return {"const": rng.choice([*WORDS, 0, None, [], {}, [{"a": []}]])}
        case "array":
            least = rng.randint(0, 2)
            bounds = _some(rng, {"minItems": least, "maxItems": least + rng.randint(0, 3)})
            return {"type": "array", "items": random_schema(rng, depth + 1)} | bounds
        case "tuple":
            items = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
            return {"type": "array", "prefixItems": items, "items": rng.choice([False, {"type": "null"}])} | _some(
                rng, {"minItems": rng.randint(0, len(items))}
            )
        case "object":
            names = rng.sample([*WORDS[:10], "a", "b", "c", "id"], rng.randint(0, 5))
            schema = {
                "type": "object",
                "properties": {name: random_schema(rng, depth + 1) for name in names},
                "required": [name for name in names if rng.random() < 0.6],
            }
            more = rng.choice([False, False, None, {"type": "boolean"}])
            return schema if more is None else schema | {"additionalProperties": more}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
        case _:
            return {"type": kind}


def _some(rng: random.Random, fields):
    return {name: value for name, value in fields.items() if rng.random() < 0.7}
