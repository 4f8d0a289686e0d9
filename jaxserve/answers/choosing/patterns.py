"""The patterns of a checkpoint's `response_template`, read as plain text instead of being run.

They are untrusted: a regular expression can take exponential time. What people write in them is nearly always a marker
with some white space around it and a name inside, so that much is taken apart here, and everything else is refused.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

MAX_LENGTH = 512
"""Characters of one pattern; published ones have some 60."""
MAX_VARIANTS = 16
"""Most texts that one pattern may stand for, through alternatives and optional parts."""
MAX_DEPTH = 16
"""Groups inside of groups."""


class UnsupportedPattern(ValueError):
    """Raised for a pattern of anything but markers, white space and names; the message says what is not supported."""


class Text(NamedTuple):
    """A literal text."""

    text: str


class Space(NamedTuple):
    """White space, as much as there is; `text` is which, if the pattern names one character."""

    text: str = ""


class Hole(NamedTuple):
    """Any text up to the next piece, such as a name; `group` is the name of the pattern's group."""

    group: str


class End(NamedTuple):
    """The end of the answer."""


Piece = Text | Space | Hole | End
Variant = tuple[Piece, ...]

_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}
_QUANTIFIER = re.compile(r"[*+?]\??|\{\d{0,4}(?:,\d{0,4})?\}\??")
_GROUP = re.compile(r"\(\?P<(\w{1,40})>")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_SPACE_CLASS = re.compile(r"\[(?:\\[nstr]| |\n|\t)+\]")
_ESCAPED_SPACES = {r"\n": "\n", "\n": "\n", " ": " ", r"\t": "\t", "\t": "\t"}


def variants(pattern: str) -> list[Variant]:
    """Return the texts that a pattern stands for, each as pieces. Raises UnsupportedPattern."""
    if len(pattern) > MAX_LENGTH:
        raise UnsupportedPattern(f"is longer than {MAX_LENGTH} characters")
    reader = _Reader(pattern)
    found = reader.alternatives()
    if reader.rest:
        raise UnsupportedPattern(f"has an unmatched {reader.rest[0]!r}")
    return [_merged(variant) for variant in found]


def literal(text: str) -> Variant:
    """Return a literal text as pieces."""
    return (Text(text),)


class _Reader:
    """Parses a pattern from left to right; each method returns the alternatives that the part it parsed stands for."""

    def __init__(self, pattern: str):
        self.rest = pattern
        self._depth = 0

    def alternatives(self) -> list[Variant]:
        found: list[Variant] = []
        while True:
            found += self._sequence()
            if len(found) > MAX_VARIANTS:
                raise UnsupportedPattern(f"stands for more than {MAX_VARIANTS} texts")
            if not self.rest.startswith("|"):
                return found
            self.rest = self.rest[1:]

    def _sequence(self) -> list[Variant]:
        found: list[Variant] = [()]
        while self.rest and self.rest[0] not in "|)":
            options = self._atom()
            found = [before + option for before in found for option in options]
            if len(found) > MAX_VARIANTS:
                raise UnsupportedPattern(f"stands for more than {MAX_VARIANTS} texts")
        return found

    def _atom(self) -> list[Variant]:
        if group := _GROUP.match(self.rest):
            self._skip(group.end())
            self._hole()
            return [(Hole(group[1]),)]
        if self.rest[0] == "(":
            is_ahead = self.rest.startswith("(?=")
            if self.rest.startswith("(?") and not self.rest.startswith(("(?:", "(?=")):
                raise UnsupportedPattern(f"has a group {self.rest[:4]!r}")
            self._skip(3 if self.rest.startswith("(?") else 1)
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise UnsupportedPattern(f"has more than {MAX_DEPTH} groups inside of groups")
            options = self.alternatives()
            self._depth -= 1
            self._skip_one(")")
            if is_ahead:  # the text that follows is read anyway
                return [()]
            return self._quantified(options)
        if self.rest[0] in "$" or self.rest.startswith(r"\Z"):
            self._skip(1 if self.rest[0] == "$" else 2)
            return [(End(),)]
        return self._character()

    def _character(self) -> list[Variant]:
        token = self._token()
        if token in (r"\s", *_ESCAPED_SPACES) or _SPACE_CLASS.fullmatch(token):
            if self._take_quantifier() or token not in _ESCAPED_SPACES:
                return [(Space(_ESCAPED_SPACES.get(token, "")),)]
        elif token[0] in ".[" or (token[0] == "\\" and token[1:].isalnum() and token[1:] not in _ESCAPED):
            raise UnsupportedPattern(f"has {token!r} outside of a named group")
        if token[0] in "*+?{^":
            raise UnsupportedPattern(f"has {token!r}")
        text = _ESCAPED.get(token[1:], token[1:]) if token[0] == "\\" else token
        return self._quantified([(Text(text),)])

    def _quantified(self, options: list[Variant]) -> list[Variant]:
        quantifier = self._take_quantifier()
        if quantifier in ("?", "??"):
            return [*options, ()]
        if quantifier:
            raise UnsupportedPattern(f"repeats something with {quantifier!r}")
        return options

    def _hole(self) -> None:
        """Skip the contents of a named group, which is taken to match any text up to the next piece."""
        depth = 1
        while self.rest and depth:
            depth += {"(": 1, ")": -1}.get(self._token(), 0)
        if depth:
            raise UnsupportedPattern("lacks a ')'")

    def _token(self) -> str:
        if self.rest[0] == "\\":
            if len(self.rest) < 2:
                raise UnsupportedPattern("ends with a backslash")
            return self._skip(2)
        if self.rest[0] == "[":
            found = _CLASS.match(self.rest)
            if found is None:
                raise UnsupportedPattern("has an unmatched '['")
            return self._skip(found.end())
        return self._skip(1)

    def _take_quantifier(self) -> str:
        found = _QUANTIFIER.match(self.rest)
        return "" if found is None else self._skip(found.end())

    def _skip(self, length: int) -> str:
        taken, self.rest = self.rest[:length], self.rest[length:]
        return taken

    def _skip_one(self, character: str) -> None:
        if not self.rest.startswith(character):
            raise UnsupportedPattern(f"lacks a {character!r}")
        self._skip(1)


def _merged(variant: Variant) -> Variant:
    """Return the pieces with adjacent texts joined."""
    return tuple(_merge(variant))


def _merge(variant: Variant) -> Iterator[Piece]:
    text = ""
    for piece in variant:
        if isinstance(piece, Text):
            text += piece.text
            continue
        if text:
            yield Text(text)
        text = ""
        yield piece
    if text:
        yield Text(text)
