"""Malicious grammars: they crash, exhaust or slow down a compiler that trusts its input."""

import json
import random

from jaxserve.sampling_params import StructuredOutputs

NUMBERS = [
    *("-9223372036854775808", "-9223372036854775807", "9223372036854775807", "9223372036854775808"),
    *("18446744073709551615", "18446744073709551616", "9007199254740993", "-9007199254740993", "1e400", "-1e400"),
    *("1e-400", "1e308", "4.9e-324", "0.1000000000000000055511151231257827", "9" * 400, "9" * 5000, "-0", "-0.0"),
]


def intersections(count):
    """Return a terminal that is the intersection of others, which are intersections themselves."""
    rules = "".join(f"R{i}: R{i + 1} & /a{{{i},}}.*/\n" for i in range(count))
    return f"start: R0\n{rules}R{count}: /a*/"


SLOW = StructuredOutputs(grammar=intersections(2000))
"""Takes many seconds to compile; it is a large one."""


def schemas():
    """Texts of some 150 schemas, not all of which are JSON."""
    for number in NUMBERS:
        yield f'{{"const": {number}}}'
        yield f'{{"enum": [1, {{"a": [{number}]}}]}}'
        yield f'{{"type": "integer", "minimum": {number}}}'
        yield f'{{"type": "integer", "exclusiveMaximum": {number}}}'
        yield f'{{"type": "number", "maximum": {number}, "multipleOf": {number}}}'
        yield f'{{"type": "array", "minItems": {number}, "items": {{"type": "string", "maxLength": {number}}}}}'
    for depth in (100, 1000, 20_000):
        yield '{"items":' * depth + "{}" + "}" * depth
        yield '{"not":' * depth
        yield '{"const":' + "[" * depth + "]" * depth + "}"
        yield '{"type":"string","pattern":"' + "(" * depth + "a" + ")*" * depth + '"}'
        links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(min(depth, 2500))}
        yield json.dumps({"$defs": links, "$ref": "#/$defs/d0"})
        yield json.dumps({"allOf": [{"minLength": i} for i in range(depth // 10)]})
        yield json.dumps({"oneOf": [{"const": i} for i in range(depth // 10)]})
        yield json.dumps({"enum": list(range(depth))})
        yield json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(depth)}})
        yield json.dumps({"type": "object", "required": [f"p{i}" for i in range(depth)]})
        yield json.dumps({"type": "array", "minItems": depth * 1000, "items": {"type": "array", "minItems": depth}})
    yield '{"$ref": "#"}'
    yield '{"allOf": [{"$ref": "#"}, {"$ref": "#"}]}'
    yield '{"anyOf": [{"$ref": "#"}], "oneOf": [{"$ref": "#"}, {"$ref": "#"}]}'
    yield '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'
    yield '{"properties": {"a": {"$ref": "#"}}, "required": ["a"]}'
    yield '{"const": "\\ud800"}'
    yield '{"properties": {"\\udc00": {}}}'
    yield '{"pattern": "\\u0000[^\\u0000-\\uffff]"}'
    yield '{"type": "string", "pattern": "(a{1,1000}){1,1000}"}'
    yield '{"type": "string", "pattern": "(.*a.*b.*c.*){30}"}'
    yield '{"type": 5, "enum": {}, "required": "a", "properties": [], "minimum": "b", "items": 7}'
    yield '{"x-guidance": {"lenient": true, "whitespace_pattern": "(((", "coerce_one_of": true}, "type": "object"}'
    yield '{"x-guidance": 5}'


def regexes():
    """Yield regular expressions that grow, nest or are invalid."""
    yield from ("(a{1000}){1000}", "(a|b|ab)*c" * 500, "(" * 5000, "[" + "".join(map(chr, range(0x100, 0x900))) + "]*")
    yield from (
        "(?i)" + "ß" * 5000,
        "(.*)*" * 200,
        "\\p{L}{500}",
        "(x+x+)+y",
        "a{0,100000}b",
        "[^\\x00-\\U0010ffff]",
        "",
    )


def grammars():
    """Lark and GBNF of the same kinds."""
    yield "start: start start | "
    yield "start: " + "(" * 20_000
    yield "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(500)) + 'r500: "a"'
    yield "start: R0\n" + "".join(f"R{i}: ~R{i + 1}\n" for i in range(1000)) + "R1000: /a/"
    yield intersections(300)
    yield 'start: %json {"const": -9223372036854775808}'
    yield 'start: %json {"const": 9007199254740993}'
    yield "start: %json {"
    yield "start: %json " + '{"items":' * 5000
    yield "start[max_tokens=99999999999999999999]: /a/"
    yield "start: <[4294967295]>"
    yield "root ::= " + "(" * 10_000
    yield "root ::= root root | root"
    yield 'root ::= "a"{1000000000}'
    yield "".join(f"r{i} ::= r{i + 1}\n" for i in range(1000))


def bodies():
    """Yield parts of bodies of a chat, as JSON text: hostile schemas and grammars in each of their fields."""
    rng = random.Random(0)
    for text in schemas():
        tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {text}}}}}'
        yield rng.choice(
            [
                f'"response_format": {{"type": "json_schema", "json_schema": {{"name": "x", "schema": {text}}}}}',
                f'"response_format": {{"type": "json_object", "schema": {text}}}',
                f'"structured_outputs": {{"json": {text}}}',
                f'"structured_outputs": {{"json": {json.dumps(text)}}}',
                f'"tools": [{tool}], "tool_choice": "required"',
            ]
        )
    for regex in regexes():
        yield f'"structured_outputs": {{"regex": {json.dumps(regex)}}}'
    for grammar in grammars():
        yield f'"structured_outputs": {{"grammar": {json.dumps(grammar)}}}'
