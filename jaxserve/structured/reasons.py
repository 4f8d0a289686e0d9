"""Say why a grammar cannot be compiled: the grammar engine's messages in the words of a schema's or grammar's author.

Whatever is not known here becomes a plain sentence: a caller has no use for the state of a library.
"""

import re
from collections.abc import Callable

MAX_LENGTH = 500
"""Maximum characters of a reason. It may quote the caller's own text."""

_KINDS = {
    "string": "a text",
    "positive integer": "an integer of at least 0",
    "f64": "a number",
    "array": "a list",
    "object": "an object",
}

_NOTHING = "nothing satisfies it"

_Row = tuple[str, str | Callable[[re.Match[str]], str]]

# How a message begins -> the reason, where \1 is the text of the first parentheses. The first that matches counts.
_UNKNOWN_TO_GRAMMARS: tuple[_Row, ...] = (
    (r"panic", "it is too large"),
    (r".*coerce_one_of", "'oneOf' of schemas that a value may satisfy together is not supported"),
    (r".*Unimplemented keys: \[(.*)\]", lambda match: f"{match[1].replace(chr(34), chr(39))} is not supported"),
    (r"(?:Pointer|Anchor) '(.*)' does not exist", r"a '$ref' names '\1', which is not in the schema"),
    (r"Failed to parse array index .* in pointer '(.*)'", r"a '$ref' names '\1', which is not in the schema"),
    (r"Resource '(?:json-schema:///)?(.*?)' is not present", r"'\1' is another document, and none is fetched"),
    (r"Invalid URI reference '(.*?)'", r"'\1' is no URI"),
    (r"circular references", "a '$ref' that leads back to itself beside other keywords is not supported"),
    (r"patternProperty regexes /(.*)/ and /(.*)/ are", r"a name may match both '\1' and '\2' of 'patternProperties'"),
    (r"min/maxProperties", "'minProperties' and 'maxProperties' are supported only if all properties are required"),
    (r"Value for '(.*)' has too many digits", r"'\1' has too many digits"),
)
_FAULTS_OF_SCHEMAS: tuple[_Row, ...] = (
    (r"NoExtension", _NOTHING),
    (r"(\S+) must be an? (?:array|list)$", r"'\1' must be a list"),
    (r"(\S+) must be an object", r"'\1' must be an object"),
    (r"type must be", "'type' must be the name of a type, or a list of them"),
    (r"(\S+) must be a string", r"'\1' must be a text"),
    (r"Invalid type: (.*)", r"'type' is '\1', which is no type of JSON"),
    (r"Expected (.+?) for '(.+?)'( item)?, got", lambda match: _expected(match)),
    (r"Unsatisfiable schema: (\w+) \((\S+)\) is greater than (\w+) \((\S+)\)", rf"{_NOTHING}: \1 \2 is beyond \3 \4"),
    (r"Unsatisfiable schema: integer interval \[(\S+), (\S+)\]", rf"{_NOTHING}: no integer is from \1 to \2"),
    (
        r"Unsatisfiable schema: required property '(.*)' is",
        rf"{_NOTHING}: the required property '\1' can have no value",
    ),
    (r"(?:Unsatisfiable schema|.*is unsatisfiable)", _NOTHING),
)
_OF_SCHEMAS = (*_UNKNOWN_TO_GRAMMARS, *_FAULTS_OF_SCHEMAS)
_LIMITS: tuple[_Row, ...] = (
    (r".*(?:too (?:big|large|many|complex)|limit|exceeded)", "it is too large"),
    (r"no start rule", "there is no rule 'start'"),
    (r"unknown grammar (.*)", r"\1 is unknown"),
    (r"lexer error", "nothing that a grammar may have begins here"),
    (r"failed to parse %llguidance", "%llguidance must have an object of its options"),
    (r"failed to parse %(\w+)", r"%\1 must have an object of its fields"),
)
_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_LISTING = re.compile(r"\n\s*\d+ \|.*", re.DOTALL)
_TOKEN = re.compile(r" \(at \"(?:\\.|[^\"\\])*\" \(.*?\)\)$")
_TRANSLATED = "%llguidance {}"
"""Begins the Lark that has been made of a GBNF grammar, whose lines are not those of the caller."""


def in_our_words(message: str) -> str:
    """Return the reason in a message of the grammar engine, on one line."""
    text = message.strip().replace("<non-verbose/>", "").strip()
    if (expression := _bad_expression(text)) is not None:
        return expression[:MAX_LENGTH]
    is_translated = _TRANSLATED in text
    text = _LISTING.sub("", text)
    position = _POSITION.match(text)
    if position is not None:
        text = position[3]
    nested = re.match(r"failed to compile JSON schema: (.*)", text, re.DOTALL)
    rows = _OF_SCHEMAS if position is None or nested is not None else ()
    reason = _match(nested[1] if nested is not None else text, (*rows, *_LIMITS))
    if reason is None and position is not None and nested is None:
        reason = _of_grammar(text)
    if reason is None:
        return "it cannot be followed"
    where = "" if position is None or is_translated else f"line {position[1]}, column {position[2]}: "
    return f"{where}{reason}"[:MAX_LENGTH]


def is_fault_of_schema(message: str) -> bool:
    """Return true if a message of the grammar engine says that a schema is malformed, or that nothing satisfies it."""
    return _match(message.strip(), _OF_SCHEMAS) is not None and _match(message.strip(), _UNKNOWN_TO_GRAMMARS) is None


def _match(text: str, rows: tuple[_Row, ...]) -> str | None:
    for pattern, reason in rows:
        if found := re.match(pattern, text, re.DOTALL):
            return found.expand(reason) if isinstance(reason, str) else reason(found)
    return None


def _expected(match: re.Match[str]) -> str:
    kind = _KINDS.get(match[1], f"of the type {match[1]}")
    return f"each of '{match[2]}' must be {kind}" if match[3] else f"'{match[2]}' must be {kind}"


def _bad_expression(text: str) -> str | None:
    """Return what is wrong with a regular expression, if that is the reason."""
    if "lookarounds not supported" in text:
        return "anchors and word boundaries inside of an expression are not supported"
    _, found, rest = text.partition("regex parse error:\n")
    if not found:
        return None
    lines = [line.strip() for line in rest.splitlines()]
    why = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "it cannot be read")
    return f"{lines[0]!r} is no expression that can be followed: {why}"


def _of_grammar(text: str) -> str:
    """Return what the parser of Lark says of the caller's own text, without what it knows of ours."""
    first = _TOKEN.sub("", text.strip().splitlines()[0])
    first = re.split(r"; following (?:special tokens )?are available|, expected struct|; try renaming", first)[0]
    return first.replace(" not supported yet", " is not supported").removesuffix(" (in regex)")
