"""JSON as it comes: where a value ends, and what stands in an object that calls a tool."""

import json
import re
from collections.abc import Container
from typing import Any

from jaxserve.server.parsing.events import CallArguments, CallStart, Event

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,}\]]")
_ARGUMENT_KEYS = ("arguments", "parameters")


class ValueScanner:
    """Finds the end of one JSON value, whose first character must be its first. Brackets are counted, not matched."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_scalar: bool | None = None

    def push(self, text: str) -> int | None:
        """How many characters of `text` belong to the value, if it ends here; None: all of them, and more to come."""
        position = 0
        if self._is_scalar is None and text:
            self._is_scalar = text[0] not in '"{['
        if self._is_scalar:
            end = _SCALAR_END.search(text)
            return None if end is None else end.start()
        while position < len(text):
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            match = (_INSIDE if self._in_string else _OUTSIDE).search(text, position)
            if match is None:
                return None
            position = match.end()
            character = match[0]
            if character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if character in "{[" else -1
            if not self._in_string and not self._is_escaped and self._depth <= 0:
                return position
        return None


class CallReader:
    """Reads `{"name": ..., "arguments": {...}}`, in any order of keys; "parameters" will do for "arguments".

    Attributes:
        raw: what has been read, while the object may still turn out to be no call.
        is_done, is_failed: one of them is set when no more text belongs to it.
    """

    def __init__(self, names: Container[str] | None = None):
        """With `names`, an object that names another tool is no call."""
        self.raw = ""
        self.is_done = False
        self.is_failed = False
        self.has_started = False
        self._names = names
        self._name: str | None = None
        self._held = ""  # arguments that came before the name
        self._has_arguments = False
        self._place = "object"
        self._key = ""
        self._value = ""
        self._scanner = ValueScanner()

    def push(self, text: str) -> tuple[list[Event], str]:
        """What the text brings, and what of it comes after the object; all that cannot belong to it, when it fails."""
        events: list[Event] = []
        position = 0
        while position < len(text) and not self.is_done and not self.is_failed:
            if self._place in ("key", "value"):
                end = self._scanner.push(text[position:])
                piece = text[position:] if end is None else text[position : position + end]
                position += len(piece)
                events += self._read(piece, is_complete=end is not None)
            else:
                position += self._step(text[position])
        if self.is_done:
            events += self._end()
        if not self.has_started:
            self.raw += text[:position]
        return events, text[position:]

    def _step(self, character: str) -> bool:
        """Move on at a character between keys and values. Returns whether it was taken."""
        if character.isspace():
            return True
        match self._place, character:
            case "object", "{":
                self._place = "next"
            case "next", '"':
                self._begin("key")
                return False
            case "colon", ":":
                self._place = "before value"
            case "before value", _ if character not in ",:}]":
                self._begin("value")
                return False
            case "after value", ",":
                self._place = "next"
            case (("next" | "after value"), "}"):
                self._fail()  # unless it has a name
            case _:
                self._fail()
                return False
        return True

    def _begin(self, place: str) -> None:
        self._place = place
        self._value = ""
        self._scanner = ValueScanner()

    def _fail(self) -> None:
        """No JSON: the end of a call that is known already, or none."""
        self.is_done = self.has_started
        self.is_failed = not self.has_started

    def _read(self, piece: str, *, is_complete: bool) -> list[Event]:
        """A piece of a key or a value."""
        if self._place == "value" and self._key in _ARGUMENT_KEYS:
            events = self._read_arguments(piece, is_complete=is_complete)
        else:
            self._value += piece
            events = self._read_other() if is_complete else []
        if is_complete:
            self._place = "colon" if self._place == "key" else "after value"
        return events

    def _read_other(self) -> list[Event]:
        try:
            value = _loaded(self._value)
        except ValueError:
            self._fail()
            return []
        if self._place == "key":
            self._key = value
            return []
        if self._key != "name":
            return []
        if (
            not isinstance(value, str)
            or self._name is not None
            or (self._names is not None and value not in self._names)
        ):
            self._fail()
            return []
        self._name = value
        self.has_started = True
        self.raw = ""
        held, self._held = self._held, ""
        return [CallStart(value), CallArguments(held)]

    def _read_arguments(self, piece: str, *, is_complete: bool) -> list[Event]:
        """Objects pass as they come; a string is taken to be an object that was encoded twice, null to be none."""
        self._has_arguments = True
        self._value += piece
        if self._value[0] not in "{[":
            if not is_complete:
                return []
            piece = _unwrapped(self._value)
        if self._name is None:
            self._held += piece
            return []
        return [CallArguments(piece)]

    def _end(self) -> list[Event]:
        return [] if self._has_arguments else [CallArguments("{}")]


def _unwrapped(value: str) -> str:
    try:
        decoded = _loaded(value)
    except ValueError:
        return value
    if decoded is None:
        return "{}"
    return decoded if isinstance(decoded, str) else value


def _loaded(text: str) -> Any:
    """JSON as a value. Raises ValueError, also where it is nested too deeply, or is half a surrogate, which cannot be
    sent.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if isinstance(value, str):
        value.encode()
    return value
