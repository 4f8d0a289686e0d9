"""What a caller asks for as one grammar text for llguidance, checked so that the engine can compile it.

A grammar text is llguidance's JSON form: `{"grammars": [...]}`, a list of JSON schemas and Lark grammars that may refer
to each other by name; beside them may be a limit, `max_items_in_row`. It is plain data: the front end writes it, the
engine compiles it for its tokenizer.
"""

import functools
import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from jaxserve.errors import InvalidRequest
from jaxserve.request import StructuredOutputs
from jaxserve.structured.deep_stack import with_deep_stack

MAX_GRAMMAR_BYTES = 128 * 1024
"""Bytes of a schema or grammar: with the limits below, a compilation takes seconds at the very worst."""

MAX_GBNF_BYTES = 16 * 1024
"""The translation to Lark takes the square of a grammar's size."""

MAX_ITEMS_IN_ROW = 2000
"""Ways on from one place in a text, of which each optional property of an object takes three."""

MAX_OWN_ITEMS_IN_ROW = 500
"""The same for a caller's own Lark or GBNF. Those of programming languages need some 40; of an ambiguous one there are
more with each token, and its masks take ever longer: up to 40 ms at 500, half a second at 1000.
"""

ANSWER = "answer"
"""Name of the wish's own grammar, for texts that put something around it (`compose`)."""

# Models like to indent. What they may not do is to write white space for ever.
_WHITESPACE = r" |\n[ \t]{0,64}"
# They win over a schema's own "x-guidance".
_JSON_OPTIONS: Any = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": _WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
}


def parser_limits(text: str) -> LLParserLimits:
    """The room that a grammar may take, in compiling and in each of its steps; beyond, its request fails."""
    return LLParserLimits(
        max_items_in_row=json.loads(text).get("max_items_in_row", MAX_ITEMS_IN_ROW),
        max_grammar_size=250_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


def make_grammar(wish: StructuredOutputs) -> str:
    """The grammar text of a wish. Takes milliseconds as a rule, seconds for a schema of thousands of properties.

    Raises InvalidRequest, naming the field and, where there is one, the keyword that is not supported.
    """
    param, entry = _entry(wish)
    text = _text([entry], wish)
    _check(text, param)
    return text


def compose(wish: StructuredOutputs, lark: str) -> str:
    """`lark` as the grammar, in which `@answer` stands for the wish. Raises InvalidRequest, as `make_grammar` does."""
    (entry,) = json.loads(make_grammar(wish))["grammars"]
    return _text([{"lark_grammar": lark}, {"name": ANSWER, **entry}], wish)


def lark_grammar(lark: str, *, param: str) -> str:
    """A Lark grammar of our own as a grammar text. Only its size is checked: InvalidRequest names `param`."""
    _check_size(lark, param)
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def check_json_schema(schema: Any, *, param: str) -> None:
    """Raises InvalidRequest, naming `param` and the keyword, unless `schema` can be followed."""
    _check(json.dumps({"grammars": [_json_entry(schema, param)]}), param)


def json_rule(schema: dict[str, Any]) -> str:
    """A JSON schema as a part of a Lark rule."""
    return "%json " + json.dumps(schema | {"x-guidance": _JSON_OPTIONS})


def _text(grammars: list[dict[str, Any]], wish: StructuredOutputs) -> str:
    limits = {} if wish.grammar is None else {"max_items_in_row": MAX_OWN_ITEMS_IN_ROW}
    return json.dumps({"grammars": grammars, **limits})


def _entry(wish: StructuredOutputs) -> tuple[str, dict[str, Any]]:
    """The field that carries the wish, and its entry in a list of grammars."""
    if wish.json is not None:
        param = "structured_outputs.json"
        return param, _json_entry(wish.json, param)
    if wish.json_object:
        param = "structured_outputs.json_object"
        return param, _json_entry({"type": "object"}, param)
    if wish.regex is not None:
        param = "structured_outputs.regex"
        _check_size(wish.regex, param)
        return param, {"lark_grammar": f"start: /{regex_to_lark(wish.regex, use_ascii='d')}/"}
    if wish.choice is not None:
        param = "structured_outputs.choice"
        lark = "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in wish.choice)
        _check_size(lark, param)
        return param, {"lark_grammar": lark}
    assert wish.grammar is not None
    param = "structured_outputs.grammar"
    _check_size(wish.grammar, param)
    return param, {"lark_grammar": _to_lark(wish.grammar, param)}


def _json_entry(schema: Any, param: str) -> dict[str, Any]:
    text = schema if isinstance(schema, str) else _dump(schema, param)
    if text.strip() == "true":
        text = "{}"  # the same, and has room for options
    elif text.strip() == "false":
        raise InvalidRequest(f"{param}: nothing satisfies false", param=param, code="unsupported_grammar")
    _check_size(text, param)
    try:
        grammar = LLMatcher.grammar_from_json_schema(text, None, _JSON_OPTIONS)
    except ValueError as error:
        raise InvalidRequest(f"{param} is not a JSON schema: {error}", param=param) from error
    return {"json_schema": json.loads(grammar)["grammars"][0]["json_schema"]}


def _dump(schema: Any, param: str) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from error


def _to_lark(grammar: str, param: str) -> str:
    """Lark as it is; GBNF, which has `::=`, translated."""
    if "::=" in grammar and len(grammar) > MAX_GBNF_BYTES:
        raise InvalidRequest(f"{param}: at most {MAX_GBNF_BYTES} characters of GBNF are allowed", param=param)
    try:
        return any_to_lark(grammar)
    except Exception as error:  # the translator raises bare Exceptions
        raise InvalidRequest(f"{param}: {error}", param=param) from error


def _check_size(text: str, param: str) -> None:
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"{param} has {len(text)} characters, at most {MAX_GRAMMAR_BYTES} are allowed", param=param
        )


def _check(text: str, param: str) -> None:
    """Compile a grammar for an alphabet of bytes and look for a first byte: what passes has at least one sentence
    begun. Raises InvalidRequest.
    """

    def compile_and_look() -> LLMatcher:
        matcher = LLMatcher(_byte_tokenizer(), text, log_level=0, limits=parser_limits(text))
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher

    matcher = with_deep_stack(compile_and_look)
    if matcher.is_error():
        raise InvalidRequest(f"{param}: {_reason(matcher.get_error())}", param=param, code="unsupported_grammar")


def _reason(message: str) -> str:
    """The message of llguidance on a line or two, without its internal state."""
    if message.startswith("NoExtension"):
        return "nothing satisfies it"
    if message.startswith("panic"):
        return "it is too large"
    lines = [line.strip() for line in message.splitlines() if line.strip() and "<non-verbose/>" not in line]
    return "; ".join(lines)[:500] or "it cannot be compiled"


@functools.cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")
