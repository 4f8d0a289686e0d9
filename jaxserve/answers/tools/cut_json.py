"""Convert the arguments of calls in earlier turns to objects, even if a token limit has truncated their JSON."""

import collections
import contextlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec

MAX_STEPS = 32
"""Values that are dropped from the end before a text is considered invalid JSON."""
MAX_DEPTH = 64
"""Maximum nesting of objects and lists up to which a truncated text is completed."""

_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)


def paired(text: str) -> str:
    """Return JSON with each half of a surrogate pair, which is no character, replaced by U+FFFD."""
    return _ESCAPE.sub(lambda escape: r"\ufffd" if escape[1] else escape[0], text)


def as_object(text: str) -> dict[str, Any]:
    """Return the arguments of a call: of truncated JSON, its complete part; anything but an object is wrapped in
    one.
    """
    if not text.strip():
        return {}
    value = _decoded(paired(text))
    if value is None:
        value = _completed(paired(text))
    return value if isinstance(value, dict) else {"arguments": text}


def _completed(text: str) -> Any:
    """Return the object that a text begins, with open values closed; None if it does not begin one."""
    if not text.lstrip().startswith("{"):
        return None
    ends, closings = _ends(text)
    whole = text + ('"' if closings.startswith('"') else "")
    candidates = [(whole, closings.removeprefix('"'))]
    candidates += [(text[:end], closing) for end, closing in reversed(ends)]
    decoded = (_decoded(start + closing) for start, closing in candidates)
    return next((value for value in decoded if value is not None), None)


def _ends(text: str) -> tuple[Sequence[tuple[int, str]], str]:
    """Return the last positions where a value may have ended, each with the closing brackets needed there, and the
    closing of the whole text, which begins with a quote if the text ends inside a string.
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
    """Return the JSON value of a text, or None if it is invalid. Models also write line breaks within strings, and
    numbers that are none in JSON or too large, which are kept as text.
    """
    with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError):
        return msgspec.json.decode(text)
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text, strict=False, parse_float=_number, parse_constant=str)
    return None


def _number(text: str) -> float | str:
    return value if math.isfinite(value := float(text)) else text
