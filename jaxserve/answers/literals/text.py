"""Reads a text between quotes, as models write it, and passes it on as JSON. Where its end is missing, marks end it."""

import functools
import json
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass

import regex

from jaxserve.answers.literals.source import Sink, Source

_PLAIN = regex.compile(r"[^\"'\\\x00-\x1f]*")
_TEXT_END = regex.compile(
    r"[\"'\x00-\x1f]|\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\U00[01][0-9a-fA-F]{5}|\\[^uxU]", regex.DOTALL
)
_AFTER_KEY = regex.compile(r"\s{0,256}+[:=,}]")
_AFTER_TEXT = regex.compile(
    r"\s{0,256}+(?:[)\]}<`\[]"  # brackets or marks; a comma and what can follow it; another key, without a comma
    r"|,\s{0,256}+(?:[\"'\d\[\]{}()<*-]|\w{1,64}+\s{0,8}+[:=]|(?:true|false|null|True|False|None)(?=\W))"
    r"|(?<=\s)(?<quote>[\"'])[^\"'\\\n]{1,64}+(?P=quote)\s{0,8}+:)"
)
_OWN_ESCAPES = ('"', "\\", "/", "b", "f", "n", "r", "t")


@dataclass(frozen=True)
class ValueEnds:
    """Marks that end an incomplete value.

    Attributes:
        stop: what begins like a value, and is none; None: nothing does.
        plain: characters of a text that need no closer look.
        marks: what ends a text between quotes: the group "head" is the beginning of another call, with its name, and
            "tail" are marks at the end of the answer; None: nothing does.
        is_offered: whether there is a tool of this name.
    """

    stop: regex.Pattern | None = None
    plain: regex.Pattern = _PLAIN
    marks: regex.Pattern | None = None
    is_offered: Callable[[str], bool] = bool

    def ends_text(self, source: Source) -> Generator[None, None, bool]:
        """Return true if the next text ends a text between quotes."""
        if self.marks is None:
            return False
        while True:
            match = yield from source.peek(self.marks)
            if match is None or match.lastgroup == "head" or source.is_last:
                return match is not None and (match.lastgroup == "tail" or self.is_offered(match["name"]))
            yield


def read_text(
    source: Source, sink: Sink, quote: str, *, ends: ValueEnds, is_key: bool, is_whole: bool, num_calls: int
) -> Generator[None, None, bool]:
    """Read a text between two quotes; returns False if the source ends in it.

    Quotes inside need no escapes, unless the text `is_whole`, all of a value: an end is followed by what follows a key
    or a value, but, if this is in a call of Python, not by more than the `num_calls` parentheses that are open.
    """
    source.take(len(quote))
    sink('"')
    is_own = quote not in ('"', "'")
    after = _AFTER_KEY if is_key else _AFTER_TEXT
    while True:
        yield from source.run(ends.plain, (lambda text: sink(escaped(text))) if is_own else sink)
        if not source.buffer:
            if not source.is_cut:
                sink('"')
            return not source.is_cut
        own_end = (yield from source.peek(_end(quote))) if is_own else None
        if own_end is None and (yield from ends.ends_text(source)):
            sink('"')
            return True
        if is_own:
            mark = source.take(1 if own_end is None else len(quote))
        else:
            end = yield from source.peek(_TEXT_END)
            mark = source.take(1 if end is None else end.end())
        is_end = mark == quote
        if is_end and not is_own and not is_whole:  # models do not always escape those inside
            is_end = (yield from source.peek(after)) is not None or (source.is_last and not source.buffer.strip())
            is_end &= num_calls == 0 or (yield from source.peek(_closings(num_calls + 1))) is None
        if is_end:
            sink('"')
            return True
        sink(escaped(mark) if is_own else _in_text(mark))


@functools.lru_cache(maxsize=64)
def _closings(number: int) -> regex.Pattern:
    return regex.compile(rf"(?:\s{{0,8}}\)){{{number}}}")


@functools.lru_cache(maxsize=64)
def _end(quote: str) -> regex.Pattern:
    return regex.compile(regex.escape(quote))


def escaped(text: str) -> str:
    """Return a text as it is within quotes in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _in_text(mark: str) -> str:
    """Return a quote, a control character or an escape as JSON has it inside of a text."""
    if mark in ("'", "\\'"):
        return "'"
    if mark[:2] in ("\\x", "\\U"):
        return escaped(chr(min(int(mark[2:], 16), sys.maxunicode)))
    is_json = mark[0] == "\\" and (len(mark) > 2 or mark[1:] in _OWN_ESCAPES)
    return mark if is_json else escaped(mark)
