"""The arguments of calls in earlier turns as an object, whatever the model has written: a limit may have cut them."""

import collections
from collections.abc import Sequence
from typing import Any

import msgspec

MAX_STEPS = 32
"""Values that are dropped from the end before a text counts as no JSON."""
MAX_DEPTH = 64
"""Objects and lists in each other: where a text has more, its end is not looked for."""


def as_object(text: str) -> dict[str, Any]:
    """Return the arguments of a call. Of a text that was cut, what is complete; what is no object stands in one."""
    if not text.strip():
        return {}
    value = _decoded(text)
    if value is None:
        value = _completed(text)
    return value if isinstance(value, dict) else {"arguments": text}


def _completed(text: str) -> Any:
    """Return the object that a text begins, with what was open in it closed; None if it begins none."""
    if not text.lstrip().startswith("{"):
        return None
    ends, closings = _ends(text)
    whole = text + ('"' if closings.startswith('"') else "")
    candidates = [(whole, closings.removeprefix('"'))]
    candidates += [(text[:end], closing) for end, closing in reversed(ends)]
    decoded = (_decoded(start + closing) for start, closing in candidates)
    return next((value for value in decoded if value is not None), None)


def _ends(text: str) -> tuple[Sequence[tuple[int, str]], str]:
    """Return the last positions where a value may have ended, each with what closes the objects and lists around it,
    and what closes the whole text: a quote first where it ends inside a string.
    """
    ends: collections.deque[tuple[int, str]] = collections.deque(maxlen=MAX_STEPS)
    closing = ""
    is_text = is_escaped = False
    for position, character in enumerate(text):
        if is_escaped:
            is_escaped = False
        elif is_text:
            is_escaped = character == "\\"
            is_text = character != '"'
        elif character == '"':
            is_text = True
        elif character in "{[":
            closing = ("}" if character == "{" else "]") + closing
            ends.append((position + 1, closing))
        elif character == ",":
            ends.append((position, closing))
        elif character in "}]" and closing.startswith(character):
            closing = closing[1:]
            ends.append((position + 1, closing))
        if len(closing) > MAX_DEPTH:
            break
    return ends, ('"' if is_text else "") + closing


def _decoded(text: str) -> Any:
    """Return the JSON value of a text, None if it has none."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
