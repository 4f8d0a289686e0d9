"""Translate a checkpoint's own `response_template` (transformers 5.13 and later, `transformers.utils.chat_parsing`)
into a syntax.

A template describes by texts and patterns where thoughts, words and calls begin and end, and how a call is taken apart.
It comes with weights from an untrusted source, so none of it is executed: each field is translated, or rejected by
name.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.answers.choosing.patterns import (
    End,
    Hole,
    Piece,
    Space,
    Text,
    UnsupportedPattern,
    Variant,
    literal,
    variants,
)
from jaxserve.answers.choosing.texts import split_key, split_name
from jaxserve.answers.syntaxes.syntax import Calls, Channels, Object, Pair, PythonCall, Syntax, Tags, Thoughts, Wrapped

MAX_TEXT = 512
"""Characters of one text."""
MAX_TEXTS = 16
"""Texts in one list of them."""

_THOUGHTS = ("thinking", "reasoning", "reasoning_content")
_TOP_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args"),
    *("repeats", "join", "optional", "transform", "transform_each"),
}
_PLACEHOLDER = re.compile(r"\{(\w+)(?:\.(\w+))?\}")


class UnsupportedTemplate(ValueError):
    """Raised for a response_template that no syntax can express; the message names what is not supported."""


class _Field(NamedTuple):
    """One field of a template, with its opening and closing texts as pieces; without openings it takes the remaining
    text.
    """

    path: str
    spec: Mapping[str, Any]
    openings: list[Variant]
    closings: list[Variant]

    @property
    def content(self) -> str:
        """Return how the field's text is read."""
        return self.spec.get("content", "text")

    def refuse(self, key: str, why: str) -> UnsupportedTemplate:
        """Return the error for one of the field's keys."""
        return UnsupportedTemplate(f"{self.path}.{key} {why}")


def from_response_template(spec: Any) -> Syntax:
    """Return the syntax that a template describes. Raises UnsupportedTemplate."""
    if not isinstance(spec, dict) or not isinstance(spec.get("fields"), dict):
        raise UnsupportedTemplate("response_template has no fields")
    if unknown := sorted(map(str, spec.keys() - _TOP_KEYS)):
        raise UnsupportedTemplate(f"response_template.{unknown[0][:40]} is not known")
    if spec.get("version", 1) != 1:
        raise UnsupportedTemplate("response_template.version is not 1")
    fields = {name: _field(f"response_template.fields.{name[:40]}", raw) for name, raw in spec["fields"].items()}
    for name, field in fields.items():
        if name not in (*_THOUGHTS, "content", "tool_calls"):
            raise UnsupportedTemplate(f"{field.path} is no part of an answer")
        if name != "tool_calls" and field.content != "text":
            raise field.refuse("content", "is not 'text'")
    thinking = [fields[name] for name in _THOUGHTS if name in fields]
    if len(thinking) > 1:
        raise UnsupportedTemplate(f"{thinking[1].path} is a second field of thoughts")
    if any("<|channel|>" in _text(opening) for field in fields.values() for opening in field.openings):
        return Syntax(
            Calls(arguments=Channels(), is_parallel=False),
            Thoughts(opening=(), closing=()),
        )
    calls = _calls(fields["tool_calls"]) if "tool_calls" in fields else None
    return Syntax(calls, _thoughts(thinking[0], fields.get("content")) if thinking else None)


def _field(path: str, spec: Any) -> _Field:
    if not isinstance(spec, dict):
        raise UnsupportedTemplate(f"{path} is no object")
    if unknown := sorted(map(str, spec.keys() - _FIELD_KEYS)):
        raise UnsupportedTemplate(f"{path}.{unknown[0][:40]} is not known")
    if not isinstance(spec.get("content", "text"), str):
        raise UnsupportedTemplate(f"{path}.content is no text")
    return _Field(path, spec, _marks(path, spec, "open"), _marks(path, spec, "close"))


def _marks(path: str, spec: Mapping[str, Any], key: str) -> list[Variant]:
    """Return what opens or closes a field: one text, a list of texts, or a pattern."""
    if f"{key}_pattern" in spec:
        if key in spec:
            raise UnsupportedTemplate(f"{path}.{key}_pattern stands beside {key}")
        return _pattern(f"{path}.{key}_pattern", spec[f"{key}_pattern"])
    texts = spec.get(key, [])
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or len(texts) > MAX_TEXTS:
        raise UnsupportedTemplate(f"{path}.{key} is no text, and no list of at most {MAX_TEXTS} texts")
    if not all(isinstance(text, str) and 0 < len(text) <= MAX_TEXT for text in texts):
        raise UnsupportedTemplate(f"{path}.{key} has a text that is empty or longer than {MAX_TEXT} characters")
    return [literal(text) for text in texts]


def _pattern(path: str, pattern: Any) -> list[Variant]:
    if not isinstance(pattern, str):
        raise UnsupportedTemplate(f"{path} is no text")
    try:
        found = variants(pattern)
    except UnsupportedPattern as error:
        raise UnsupportedTemplate(f"{path} {error}") from error
    if not all(any(isinstance(piece, Text | End) for piece in variant) for variant in found):
        raise UnsupportedTemplate(f"{path} stands for nothing, or for white space alone")
    return found


def _thoughts(field: _Field, content: _Field | None) -> Thoughts:
    openings, closings = _texts(field.openings), _texts(field.closings)
    if not closings:
        raise field.refuse("close", "is missing")
    answer = ("", "")
    if content is not None and content.openings:
        answer = (_texts(content.openings)[0], next(iter(_texts(content.closings)), ""))
    return Thoughts(opening=openings, closing=closings, answer=answer, starts_open=not openings)


def _calls(field: _Field) -> Calls:
    if not field.openings:
        raise field.refuse("open", "is missing")
    name, arguments = _where(field)
    is_each = field.spec.get("transform_each", False) is True
    has_name = any(isinstance(piece, Hole) for opening in field.openings for piece in opening)
    closings = _texts(field.closings)
    if not has_name:
        if field.content != "json":
            raise field.refuse("content", "is not 'json', and no name is in open_pattern")
        section, call = _outer_and_inner(field, _texts(field.openings), closings)
        if is_each:
            section, call = (section[0] + call[0], call[1] + section[1]), ("", "")
        return Calls(
            arguments=Wrapped(name=name, arguments=arguments),
            section=section,
            call=call,
            is_list=is_each,
            separator=", " if is_each else "\n",
            is_parallel=is_each or _repeats(field),
        )
    heads = [_around(field, opening) for opening in field.openings]
    if len({after for _, after in heads}) != 1:
        raise field.refuse("open_pattern", "has different texts behind the name")
    befores, after = tuple(dict.fromkeys(before for before, _ in heads)), heads[0][1]
    if field.content == "json":
        found = _spelled_object(befores, after)
        if found is not None:
            mark, keys = found
            closing = closings[0].removeprefix("}").strip() if closings else ""
            return Calls(
                arguments=keys,
                call=(mark, closing),
                is_bare=not mark,
                separator="; ",
                is_parallel=_repeats(field),
            )
        return _named(field, Object(quote=_quote(field)), befores, after, closings)
    if field.content == "xml-inline":
        tags = _tags(field)
        return _named(field, tags, befores, after, closings)
    raise field.refuse("content", f"is {field.content!r:.40}")


def _named(
    field: _Field, arguments: Object | Tags | PythonCall, befores: Sequence[str], after: str, closings: Sequence[str]
) -> Calls:
    """Return calls whose name is outside their arguments."""
    separator = "" if isinstance(arguments, Object) else "\n"
    is_list = False
    if isinstance(arguments, PythonCall):
        if not after.startswith("("):
            raise field.refuse("open_pattern", "has no bracket behind the name")
        is_list, separator, after = any(before.rstrip().endswith("[") for before in befores), ", ", after[1:]
        befores = [before.rstrip().removesuffix("[") for before in befores if not before.startswith(",")]
        closings = [closing.removeprefix(")").removeprefix("]") for closing in closings]
        section, call = (befores[0], max(closings, key=len, default="")), ("", "")
    else:
        section, call = _outer_and_inner(field, befores, closings)
    opening, name_begin = split_name(call[0])
    if (tag := re.match(r"<([\w:]+)[= ]", name_begin)) and opening and f"</{tag[1]}>" not in call[1]:
        call = (call[0], f"</{tag[1]}>\n{call[1]}")  # the patterns leave it to the arguments
    return Calls(
        arguments=arguments,
        section=section,
        call=(opening, call[1]),
        name=(name_begin, after),
        separator=separator,
        is_list=is_list,
        is_bare=not (section[0] or call[0]),
        is_parallel=_repeats(field),
    )


def _repeats(field: _Field) -> bool:
    return field.spec.get("repeats", False) is True


def _where(field: _Field) -> Pair:
    """Return the keys under which the content of a call has name and arguments, as the transform puts them together."""
    transform = field.spec.get("transform")
    if isinstance(transform, dict):
        transform = transform.get("function", transform)
    if transform == "{content}":
        return "name", "arguments"
    if not isinstance(transform, dict):
        raise field.refuse("transform", "does not say where name and arguments are")
    name, arguments = (_PLACEHOLDER.fullmatch(str(transform.get(key))) for key in ("name", "arguments"))
    if name is None or arguments is None:
        raise field.refuse("transform", "does not say where name and arguments are")
    return name[2] or name[1], arguments[2] or arguments[1]


def _quote(field: _Field) -> str:
    """Return the delimiter of strings in the JSON of a call."""
    args = field.spec.get("content_args")
    pairs = args.get("string_delims", []) if isinstance(args, dict) else []
    if not pairs:
        return '"'
    delimiters = pairs[0] if isinstance(pairs, list) and len(pairs) == 1 else None
    match delimiters:
        case [str(quote), str(other)] if quote == other and 0 < len(quote) <= MAX_TEXT:
            return quote
    raise field.refuse("content_args.string_delims", "is not one text on both sides")


def _tags(field: _Field) -> Tags | PythonCall:
    """Return how keys and values are written."""
    args = field.spec.get("content_args")
    pattern = args.get("tag_pattern") if isinstance(args, dict) else None
    found = _pattern(f"{field.path}.content_args.tag_pattern", pattern)
    groups = [piece.group for piece in found[0] if isinstance(piece, Hole)]
    if len(found) != 1 or groups != ["key", "value"]:
        raise field.refuse("content_args.tag_pattern", "is not a key and a value")
    pieces = found[0]
    key, value = pieces.index(Hole("key")), pieces.index(Hole("value"))
    before, between, after = _text(pieces[:key]), _text(pieces[key + 1 : value]), _text(pieces[value + 1 :])
    if not before and between == "=":
        return PythonCall()
    if not before or not after:
        raise field.refuse("content_args.tag_pattern", "has a key or a value without a tag")
    pads = any(isinstance(piece, Space) for piece in pieces[value + 1 :])
    key_end, value_begin = split_key(between)
    return Tags(
        key=(before, key_end.rstrip() + ("\n" if pads or value_begin else "")),
        value=(value_begin, ("\n" if pads else "") + after + "\n"),
    )


def _spelled_object(befores: Sequence[str], after: str) -> tuple[str, Wrapped] | None:
    """Return the mark and the keys of a call that is a JSON object whose beginning the pattern spells."""
    before = re.fullmatch(r'(.*)\{\s*"(\w+)":\s*"', befores[0], re.DOTALL)
    behind = re.fullmatch(r'",\s*"(\w+)":\s*', after)
    if before is None or behind is None or len(befores) != 1:
        return None
    return before[1], Wrapped(name=before[2], arguments=behind[1])


def _outer_and_inner(field: _Field, openings: Sequence[str], closings: Sequence[str]) -> tuple[Pair, Pair]:
    """Return the marks of a section and those of a call, where some openings and closings have both."""
    opening, closing = min(openings, key=len), min(closings, key=len, default="")
    longest, last = max(openings, key=len), max(closings, key=len, default="")
    if not longest.endswith(opening):
        raise field.refuse("open", "has texts that are not ends of each other")
    if not last.startswith(closing):
        raise field.refuse("close", "has texts that are not beginnings of each other")
    return (longest[: len(longest) - len(opening)], last[len(closing) :]), (opening, closing)


def _around(field: _Field, opening: Variant) -> Pair:
    """Return the texts before and after the name in an opening."""
    holes = [index for index, piece in enumerate(opening) if isinstance(piece, Hole)]
    if len(holes) != 1 or opening[holes[0]] != Hole("name"):
        raise field.refuse("open_pattern", "has groups other than one name")
    return _text(opening[: holes[0]]), _text(opening[holes[0] + 1 :])


def _texts(marks: Sequence[Variant]) -> tuple[str, ...]:
    """Return the texts of marks, without those that are nothing but the end of the answer."""
    return tuple(dict.fromkeys(text for text in map(_text, marks) if text))


def _text(pieces: Sequence[Piece]) -> str:
    """Return a mark as a text. White space between two tags is a line break, elsewhere a blank; at the ends it is left
    to the reader, which takes any.
    """
    text, gap = "", None
    for piece in pieces:
        if isinstance(piece, Text):
            if gap is not None and not piece.text[0].isspace():
                text += gap.text or ("\n" if text.endswith((">", "]")) and piece.text[0] in "<[" else " ")
            text += piece.text
            gap = None
        elif isinstance(piece, Space) and (text or piece.text):
            gap = piece
    return text + (gap.text if gap is not None else "")
