"""Turn a caller's constraint into one grammar text for llguidance, checked so that the engine can compile it.

A grammar text is llguidance's JSON format: `{"grammars": [...]}`, a list of JSON schemas and Lark grammars that may
refer to each other by name, with two optional additions: `max_items_in_row`, and a `limit` on the beginning of the
text, which contains further grammar texts (`Limit`). It is plain data: the front end writes it, the engine compiles it
for its tokenizer. Whatever parses a caller's own text runs in a process that may crash (`pool`).
"""

import functools
import json
import random
import re
import time
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from jaxserve.errors import InvalidRequest
from jaxserve.sampling_params import StructuredOutputs
from jaxserve.structured.deep_stack import STACK_BYTES, with_stack
from jaxserve.structured.disjoint import types
from jaxserve.structured.equivalents import Unfollowable
from jaxserve.structured.loosening import loosened
from jaxserve.structured.reasons import in_our_words
from jaxserve.structured.schemas import describes_object, followable
from jaxserve.structured.tags import tag_lark

MAX_GRAMMAR_BYTES = 128 * 1024
"""Maximum bytes of a schema or grammar: with the limits below, the worst compilation takes seconds."""

MAX_GBNF_BYTES = 16 * 1024
"""Maximum characters of GBNF, lower because translation to Lark takes quadratic time."""

MAX_ITEMS_IN_ROW = 2000
"""Maximum ways to continue at one point of a text. Each optional property of an object takes three."""

MAX_OWN_ITEMS_IN_ROW = 500
"""MAX_ITEMS_IN_ROW for a caller's own Lark or GBNF.

Grammars of programming languages need some 40. In an ambiguous grammar the number grows with each token, and its masks
take ever longer: up to 40 ms at 500, half a second at 1000.
"""

ANSWER = "answer"
"""Name of the constraint's own grammar in a grammar text that wraps it (`compose`)."""

# Models like to indent, but must not be able to write white space forever.
_WHITESPACE = r" |\n[ \t]{0,64}"

_TRIAL_STEPS = 32
_MAX_STEP_SECONDS = 0.25
"""Maximum CPU time of a trial step, whose alphabet is bytes. The engine's steps take longer, and delay all requests."""
_TRIAL_STACK_BYTES = 2**20  # half the stack of the engine's threads that compute masks
_SPACES = re.compile(
    r"(?:[ \n\r\t|()*+?]|\(\?:|\\[nrts ]|\\x(?:20|0[9aAdD])|\[(?:[ \n\r\t]|\\[nrts ]|\\x(?:20|0[9aAdD]))+\]"
    r"|\{\d{1,4}(?:,\d{0,4})?\})+"
)
_RULE = re.compile(r"(?m)^[ \t]*(?:%[a-z]|[?!_]*[A-Za-z]\w*(?:\.\d+)?[ \t]*(?:\[[^\]\n]*\])?[ \t]*:(?!:=))")
_LARK_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<json>%json\b\s*)')
_ENGINE_OPTIONS = ("item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern")


class JsonOptions(NamedTuple):
    """The formatting of JSON. `whitespace` is a regex for what may separate its parts, "" for nothing.

    `is_closed`: objects whose schema names properties have no others, unless the schema says so.
    """

    is_closed: bool = True
    whitespace: str = _WHITESPACE


def json_options(outputs: StructuredOutputs | None, *, is_closed: bool = True) -> JsonOptions:
    """Return the JSON formatting that a constraint asks for; `is_closed` is the default if it does not say.

    Raises InvalidRequest for a `whitespace_pattern` that allows anything but white space.
    """
    if outputs is None:
        return JsonOptions(is_closed)
    if outputs.disable_additional_properties is not None:
        is_closed = outputs.disable_additional_properties
    if outputs.disable_any_whitespace:
        return JsonOptions(is_closed, "")
    if outputs.whitespace_pattern is None:
        return JsonOptions(is_closed)
    return JsonOptions(is_closed, _check_whitespace(outputs.whitespace_pattern))


def parser_limits(text: str) -> LLParserLimits:
    """Return the limits of a grammar's compilation and of each of its steps; a request that exceeds them fails."""
    return LLParserLimits(
        max_items_in_row=json.loads(text).get("max_items_in_row", MAX_ITEMS_IN_ROW),
        max_grammar_size=250_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


def make_grammar(constraint: StructuredOutputs, *, is_closed: bool = True, left_out: list[str] | None = None) -> str:
    """Compile a constraint into its grammar text. Usually takes milliseconds, but seconds for a schema of thousands of
    properties. If what no grammar can follow may be left out of a schema, it is appended to `left_out`.

    Raises InvalidRequest, naming the field and, if there is one, the unsupported keyword. A hostile constraint may
    crash the process: callers go through `GrammarPool`.
    """
    param, entry = _entry(constraint, json_options(constraint, is_closed=is_closed), left_out)
    limits = {} if constraint.grammar is None else {"max_items_in_row": MAX_OWN_ITEMS_IN_ROW}
    text = json.dumps({"grammars": [entry], **limits})
    _check(text, param)
    return text


def compose(answer: str, lark: str) -> str:
    """Return the grammar text of `lark`, in which `@answer` refers to the checked grammar text `answer`."""
    checked = json.loads(answer)
    (entry,) = checked["grammars"]
    return json.dumps({**checked, "grammars": [{"lark_grammar": lark}, {"name": ANSWER, **entry}]})


def lark_grammar(lark: str, *, param: str) -> str:
    """Wrap a trusted Lark grammar in a grammar text. Only its size is checked: InvalidRequest names `param`."""
    check_size(lark, param)
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


class Limit(NamedTuple):
    """A limit on the number of tokens at the beginning of a text, after what the grammar text `opening` matches, if
    there is one.

    While the tokens match `during` and it has not ended, there are at most `max_tokens` of them; then the text is
    forced to continue with `after`.
    """

    max_tokens: int
    opening: str
    during: str
    after: str


def limited(text: str, limit: Limit) -> str:
    """Return a grammar text whose beginning is limited."""
    return json.dumps({**json.loads(text), "limit": limit._asdict()})


def limit_of(text: str) -> Limit | None:
    """Return the limit on the beginning of a grammar text, or None if there is none."""
    limit = json.loads(text).get("limit")
    return None if limit is None else Limit(**limit)


def arguments_schema(schema: str, *, param: str, options: JsonOptions, left_out: list[str] | None = None) -> str:
    """Return a tool's parameters, a JSON schema, as `json_rule` takes them; only objects satisfy the result. `left_out`
    is that of `make_grammar`.

    Raises InvalidRequest as `make_grammar` does, and for a schema that allows no objects; it may crash the process too.
    """
    rewritten = _followable(schema, param, options, left_out)
    if rewritten is True:
        rewritten = {}
    if not describes_object(rewritten):
        if "object" not in types(rewritten):
            raise InvalidRequest(f"{param}: the arguments of a call are an object", param=param)
        rewritten = {**rewritten, "type": "object"}
    entry = _with_options(rewritten, options)
    _check(json.dumps({"grammars": [{"json_schema": entry}]}), param)
    return json.dumps(entry)


def json_rule(schema: dict[str, Any]) -> str:
    """Write a JSON schema, from `arguments_schema` or a trusted one, as part of a Lark rule."""
    return "%json " + json.dumps(schema if "x-guidance" in schema else _with_options(schema, JsonOptions()))


def check_size(text: str, param: str) -> None:
    """Raise InvalidRequest if a text is too long to be compiled or is not valid Unicode."""
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"{param} has {len(text)} characters, at most {MAX_GRAMMAR_BYTES} are allowed", param=param
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} is not valid Unicode: {error.reason}", param=param) from error


def schema_text(schema: Any, param: str) -> str:
    """Return a JSON schema as text of allowed size. Raises InvalidRequest, naming `param`."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from error
    check_size(text, param)
    return text


def _entry(
    constraint: StructuredOutputs, options: JsonOptions, left_out: list[str] | None
) -> tuple[str, dict[str, Any]]:
    """Return the field that carries the constraint, and its entry in a list of grammars."""
    if constraint.json is not None:
        param = "structured_outputs.json"
        schema = _followable(schema_text(constraint.json, param), param, options, left_out)
        return param, {"json_schema": _with_options({} if schema is True else schema, options)}
    if constraint.json_object:
        return "structured_outputs.json_object", {"json_schema": _with_options({"type": "object"}, options)}
    if constraint.regex is not None:
        param = "structured_outputs.regex"
        check_size(constraint.regex, param)
        return param, {"lark_grammar": f"start: /{regex_to_lark(constraint.regex, use_ascii='d')}/"}
    if constraint.choice is not None:
        param = "structured_outputs.choice"
        lark = "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in constraint.choice)
        check_size(lark, param)
        return param, {"lark_grammar": lark}
    if constraint.structural_tag is not None:
        param = "structured_outputs.structural_tag"
        return param, {"lark_grammar": _structural_tag(constraint.structural_tag, param, options)}
    assert constraint.grammar is not None
    param = "structured_outputs.grammar"
    check_size(constraint.grammar, param)
    return param, {"lark_grammar": _to_lark(constraint.grammar, param)}


def _structural_tag(given: str | dict[str, Any], param: str, options: JsonOptions) -> str:
    def write(schema: Any, path: str) -> str:
        rewritten = _followable(json.dumps(schema), f"{param}: {path}", options, None)
        return json_rule(_with_options({} if rewritten is True else rewritten, options))

    try:
        return tag_lark(json.loads(schema_text(given, param)), write)
    except (Unfollowable, InvalidRequest) as error:
        message = str(error) if isinstance(error, InvalidRequest) else f"{param}: {error}"
        raise InvalidRequest(message, param=param, code="unsupported_grammar") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from error


def _followable(text: str, param: str, options: JsonOptions, left_out: list[str] | None) -> Any:
    def attempt(schema: Any) -> str | None:
        return _fault(json.dumps({"grammars": [{"json_schema": _with_options(schema, options)}]}))

    try:
        if left_out is None:
            schema = followable(text, is_closed=options.is_closed)
        else:
            schema, more = loosened(text, is_closed=options.is_closed, attempt=attempt)
            left_out += more
    except Unfollowable as error:
        raise InvalidRequest(f"{param}: {error}", param=param, code="unsupported_grammar") from error
    if schema is False:
        raise InvalidRequest(f"{param}: nothing satisfies false", param=param, code="unsupported_grammar")
    return schema


def _with_options(schema: dict[str, Any], options: JsonOptions) -> dict[str, Any]:
    """Return a schema with all options of the grammar engine set, replacing its own."""
    return schema | {
        "x-guidance": {
            "item_separator": ",",
            "key_separator": ":",
            "whitespace_flexible": bool(options.whitespace),
            "whitespace_pattern": options.whitespace or None,
            "coerce_one_of": False,
            "lenient": False,
        }
    }


def _check_whitespace(pattern: str) -> str:
    r"""Check a pattern, and replace \s by the white space of JSON."""
    param = "structured_outputs.whitespace_pattern"
    if not _SPACES.fullmatch(pattern):
        raise InvalidRequest(f"{param} must be an expression for white space only", param=param)
    inside = re.sub(r"\[[^\]]*\]", lambda match: match[0].replace(r"\s", r" \t\n\r"), pattern)
    return re.sub(r"\\s", r"[ \\t\\n\\r]", inside)


def _to_lark(grammar: str, param: str) -> str:
    """Return Lark with only its schemas rewritten; translate GBNF, recognized by `::=` in its rules."""
    if _RULE.search(grammar):
        return _with_followable_schemas(grammar, param)
    if len(grammar) > MAX_GBNF_BYTES:
        raise InvalidRequest(f"{param}: at most {MAX_GBNF_BYTES} characters of GBNF are allowed", param=param)
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the translator raises bare Exceptions
        raise InvalidRequest(f"{param}: {error}", param=param) from error


def _with_followable_schemas(lark: str, param: str) -> str:
    """Rewrite each schema after `%json` in a Lark grammar into one that can be followed.

    The schema's own options for white space and separators are kept.
    """
    parts, position = [], 0
    while match := _LARK_TOKEN.search(lark, position):
        parts.append(lark[position : match.end()])
        position = match.end()
        if match["json"] is not None:
            try:
                given, end = json.JSONDecoder().raw_decode(lark, position)
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(
                    f"{param}: %json is not followed by a JSON schema: {error}", param=param
                ) from error
            schema = _followable(lark[position:end], param, JsonOptions(is_closed=False), None)
            if isinstance(given, dict) and isinstance(schema, dict) and "x-guidance" in given:
                options = given["x-guidance"]
                kept = {name: options[name] for name in _ENGINE_OPTIONS if name in options}
                schema |= {"x-guidance": kept}
            parts.append(json.dumps(schema))
            position = end
    return "".join([*parts, lark[position:]])


def _check(text: str, param: str) -> None:
    """Compile a grammar for an alphabet of bytes, compute the mask of the first byte, and write a few more bytes.

    This shows that at least one text can begin, and that the steps do not crash the process. Raises InvalidRequest. The
    stacks are half as large as those on which the engine does the same.
    """
    matcher = _compiled(text)
    if matcher.is_error():
        raise InvalidRequest(f"{param}: {in_our_words(matcher.get_error())}", param=param, code="unsupported_grammar")
    if _is_slow(matcher):
        raise InvalidRequest(f"{param}: its steps take too long", param=param, code="unsupported_grammar")


def _fault(text: str) -> str | None:
    """Return the grammar engine's message about a grammar that cannot be compiled, or None."""
    matcher = _compiled(text)
    if matcher.is_error():
        return matcher.get_error()
    return "too complex" if _is_slow(matcher) else None


def _compiled(text: str) -> LLMatcher:
    def compile_and_look() -> LLMatcher:
        matcher = LLMatcher(_byte_tokenizer(), text, log_level=0, limits=parser_limits(text))
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher

    return with_stack(compile_and_look, STACK_BYTES // 2)


def _is_slow(matcher: LLMatcher) -> bool:
    """Return true if a step of writing some random bytes is too slow; a grammar that soon comes to a dead end is not
    yet an error.
    """
    return with_stack(lambda: _has_slow_step(matcher), _TRIAL_STACK_BYTES)


def _has_slow_step(matcher: LLMatcher) -> bool:
    rng = random.Random(0)
    for _ in range(_TRIAL_STEPS):
        start = time.thread_time()
        mask = matcher.compute_bitmask()
        if time.thread_time() - start > _MAX_STEP_SECONDS:
            return True
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        if matcher.is_error() or not allowed or not matcher.consume_token(rng.choice(allowed)):
            break
    return False


@functools.cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")
