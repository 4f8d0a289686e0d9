"""Refusals of schemas and grammars are in our words: they name what the caller wrote, and nothing of a library."""

import re

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.sampling_params import StructuredOutputs
from jaxserve.structured.grammar import make_grammar
from jaxserve.structured.reasons import in_our_words

CASES = [
    ("json", {"$ref": "#/definitions/nope"}, "a '$ref' names '/definitions/nope', which is not in the schema"),
    ("json", {"$ref": "#nope"}, "a '$ref' names 'nope', which is not in the schema"),
    (
        "json",
        {"items": {"$ref": "#/anyOf/x"}, "anyOf": [{}], "type": "array"},
        "'/anyOf/x', which is not in the schema",
    ),
    ("json", {"$ref": "http://x/z"}, "'http://x/z' is another document, and none is fetched"),
    ("json", {"$schema": "http://x/nope"}, "'http://x/nope' is another document"),
    ("json", {"$ref": "#", "properties": {"a": {}}}, "'$ref' that leads back to itself"),
    ("json", {"anyOf": []}, "nothing satisfies it"),
    ("json", {"type": []}, "nothing satisfies it"),
    ("json", {"enum": [1], "type": "string"}, "nothing satisfies it"),
    ("json", {"type": "string", "format": "date", "pattern": "x"}, "nothing satisfies it"),
    ("json", {"type": "integer", "minimum": 5, "maximum": 3}, "nothing satisfies it: minimum 5 is beyond maximum 3"),
    ("json", {"type": "object", "properties": {"a": False}, "required": ["a"]}, "the required property 'a'"),
    ("json", {"type": "array", "prefixItems": [False], "minItems": 1}, "nothing satisfies it"),
    ("json", {"type": "strin"}, "'type' is 'strin', which is no type of JSON"),
    ("json", {"minLength": "a"}, "'minLength' must be an integer of at least 0"),
    ("json", {"required": [5]}, "each of 'required' must be a text"),
    ("json", {"pattern": "(a)\\1"}, r"'(a)\\1' is no expression that can be followed: backreferences"),
    ("json", {"patternProperties": {"(": {}}}, "'(' is no expression that can be followed"),
    ("json", {"patternProperties": {"^a": {"type": "string"}, "^ab": {}}}, "a name may match both '^a' and '^ab'"),
    ("regex", "[z-a]", "'[z-a]' is no expression that can be followed: invalid character class range"),
    ("regex", r"a\bc", "anchors and word boundaries inside of an expression are not supported"),
    ("grammar", "start: nobody", 'line 1, column 8: unknown name: "nobody"'),
    ("grammar", 'start: "a" "', "line 1, column 13: nothing that a grammar may have begins here"),
    ("grammar", 'foo: "a"', "there is no rule 'start'"),
    ("grammar", "start: @x", "@x is unknown"),
    ("grammar", 'start: %json {"type": 5}', "line 1, column 8: 'type' must be the name of a type"),
    ("grammar", "start: <|im_end|>", 'unknown special token: "<|im_end|>"'),
    ("grammar", '%llguidance 5\nstart: "a"', "%llguidance must have an object of its options"),
    ("grammar", 'root ::= "a"{2,1}', "structured_outputs.grammar: range end must be >= start"),
]
LIBRARY = re.compile(
    r"unsatisfiable|Pointer|Anchor|registry|retriev|json-schema:|f64|NoExtension|non-verbose|panic|LLGuidance|"
    r"\d \||\(And|SearchRegex|not supported yet|Unimplemented|coerce_one_of|<\|tool\|>|struct "
)


@pytest.mark.parametrize(("field", "wish", "reason"), CASES)
def test_reasons(field, wish, reason):
    with pytest.raises(InvalidRequest) as refused:
        make_grammar(StructuredOutputs(**{field: wish}))
    message = refused.value.message
    assert reason in message
    assert message.startswith(f"structured_outputs.{field}: ")
    assert refused.value.param == f"structured_outputs.{field}"
    assert LIBRARY.search(message) is None
    assert "\n" not in message


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("something that nobody has seen at 0x7f", "it cannot be followed"),
        ("", "it cannot be followed"),
        ("panic: index out of bounds", "it is too large"),
        ("grammar size (number of symbols) too big (limit for this grammar: 5)", "it is too large"),
        ("NoExtensionBias: no next tokens\n<state>\n</state>", "nothing satisfies it"),
        ('Unimplemented keys: ["foo", "bar"]', "'foo', 'bar' is not supported"),
    ],
)
def test_what_is_unknown_is_said_plainly(message, reason):
    assert in_our_words(message) == reason
