"""Reads values as models write them, and passes them on as JSON: JSON unchanged, piece by piece, and near-JSON
corrected.

Also accepted: Python's True, None, tuples, sets and single quotes, `**{...}` in a call, keys and texts without quotes,
a syntax's own quotes, quotes and line breaks that are not escaped, missing or superfluous commas, missing closing
brackets.
"""

import contextlib
import functools
import json
import re
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import regex

from jaxserve.server.parsing.source import Sink, Source, Steps

_PLAIN = regex.compile(r"[^\"'\\\x00-\x1f]*")
_TEXT_END = regex.compile(
    r"[\"'\x00-\x1f]|\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\U00[01][0-9a-fA-F]{5}|\\[^uxU]", regex.DOTALL
)
_AFTER_KEY = regex.compile(r"\s{0,256}+[:=,}]")
_AFTER_TEXT = regex.compile(
    r"\s{0,256}+(?:[)\]}<`\[]"  # brackets or marks; a comma and what can follow it; another key, without a comma
    r"|,\s{0,256}+(?:[\"'\d\[\]{}()<*-]|\w{1,64}+\s{0,8}+[:=]|(?:true|false|null|True|False|None)\b)"
    r"|(?<=\s)(?<quote>[\"'])[^\"'\\\n]{1,64}+(?P=quote)\s{0,8}+:)"
)
_SET = regex.compile(r"\{\s{0,64}+(?:\"[^\"\\\n]{0,200}+\"|'[^'\\\n]{0,200}+'|[\w.+-]{1,64}+)\s{0,64}+[,}]")
_WORD = regex.compile(r"[\w.+-]*")
_BARE = regex.compile(r"[^,{}()\[\]\"'`<\n]*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "NaN": "null", "Infinity": "null", "undefined": "null"}
_KINDS = {"{": ("}", "}"), "[": ("])", "]"), "(": ("])", "]"), "set": ("}", "]"), "call": ("}])", "}")}
"""What is open: the brackets that close it, and the one that does so in JSON."""

_BASED = re.compile(r"[+-]?0[xXoObB]")
_CODE = re.compile(r"[+-]?0\d")  # 02134 is no number
_EQUALS = regex.compile("=")
_OWN_ESCAPES = '"\\/bfnrt'
MAX_NUMBER = 1000
"""Characters of a number in Python's spelling, which takes the square of its length to read."""


@functools.lru_cache(maxsize=64)
def _tokens(quote: str) -> regex.Pattern:
    return regex.compile(rf"{regex.escape(quote)}|[\"'{{}}()\[\]:=,]|\*\*\s{{0,8}}+\{{|[\w.+/-]")


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


class ValueReader:
    """Reads one value from a source and passes it on as JSON.

    `quote` is a further quotation mark for texts. `ends` are the marks that end a value wherever they occur. A value
    that begins with `(` is the arguments of a Python call, which become an object; positional arguments get the names
    of `positions`. `converters` returns the function that converts the text of a key of the outermost object, which is
    in quotes or not, to a value; None: it stays what it is.
    """

    def __init__(
        self,
        source: Source,
        sink: Sink,
        *,
        quote: str = '"',
        ends: "ValueEnds | None" = None,
        positions: Sequence[str] | None = None,
        converters: Callable[[str, bool], Callable[[str], str] | None] | None = None,
    ):
        self._source = source
        self._sink = sink
        self._quote = quote
        self._tokens = _tokens(quote)
        self._quote_end = regex.compile(regex.escape(quote))
        self._ends = ends or ValueEnds()
        self._is_call = positions is not None
        self._positions = iter(positions or ())
        self._converters = converters
        self._key = ""  # of the outermost object
        self._open: list[str] = []  # keys of _KINDS
        self._num_spread = 0  # objects that are open, and whose items are arguments of the call: `**{`
        self._expected = "value"  # or "key", "colon", "comma"
        self._held = ""  # a comma, unless a bracket closes after it

    def read(self) -> Generator[None, None, bool]:
        """Read to the value's end. Returns False if the text ends before, or something else follows: then, unless the
        text has been cut, the value is completed.
        """
        while True:
            spaces = yield from self._source.spaces()
            if self._held:
                self._held += spaces
            elif self._open:
                self._sink(spaces)
            token = yield from self._source.peek(self._tokens)
            stop = self._ends.stop
            if token is None or (stop is not None and (yield from self._source.peek(stop)) is not None):
                if not (self._source.is_last and self._source.is_cut):
                    self._close(0)
                return False
            if not (yield from self._take(token[0])):
                self._close(0)
                return False
            if not self._open and self._expected == "comma":
                return True

    def read_on(self, expected: str) -> Generator[None, None, bool]:
        """Read the rest of an object, as `read` does; `expected` is what comes first, "key" or "value"."""
        self._open, self._expected = ["{"], expected
        return (yield from self.read())

    def _take(self, token: str) -> Generator[None, None, bool]:
        """Take one token. Returns whether it belongs to the value."""
        if token in (self._quote, '"', "'"):
            self._begin_item(is_key=not self._is_in_call)
            yield from self._text_item(token)
        elif token in _KINDS:
            is_set = token == "{" and self._open and (yield from self._source.peek(_SET)) is not None
            kind = "set" if is_set else "call" if token == "(" and self._is_call and not self._open else token
            self._source.take(1)
            self._begin_item(is_key=False)
            self._open.append(kind)
            self._sink("{" if _KINDS[kind][1] == "}" else "[")
            self._expected = self._first_expected
        elif token in ("}", "]", ")"):
            return self._take_closing(token)
        elif token == ",":
            if self._expected == "colon":
                self._complete_item()
            if self._expected not in ("comma", "key"):
                return False
            self._source.take(1)
            self._held = "," if self._expected == "comma" else self._held
            self._expected = self._first_expected
        elif token[0] == "*":
            if not self._is_in_call or self._expected == "value":
                return False
            self._source.take(len(token))
            self._held = self._held or (", " if self._expected == "comma" else "")
            self._num_spread += 1
            self._expected = "key"
        elif token in (":", "="):
            if self._expected != "colon":
                return False
            self._source.take(1)
            self._sink(": " if token == "=" else ":")
            self._expected = "value"
        else:
            yield from self._word()
        return True

    def _take_closing(self, closing: str) -> bool:
        if self._num_spread and closing == "}" and self._open == ["call"]:
            self._source.take(1)
            self._num_spread -= 1
            self._complete_item()
            return True
        depth = len(self._open) - 1
        while depth >= 0 and closing not in _KINDS[self._open[depth]][0]:
            depth -= 1
        if depth < 0:
            return False
        self._source.take(1)
        self._sink(self._held[1:])
        self._close(depth)
        return True

    def _close(self, depth: int) -> None:
        """Complete everything that is open, except for `depth` brackets."""
        self._held = ""
        self._complete_item()
        while len(self._open) > depth:
            self._sink(_KINDS[self._open.pop()][1])
        self._expected = "comma"

    def _complete_item(self) -> None:
        if self._expected == "colon":
            self._sink(": null")
            self._expected = "comma"
        elif self._expected == "value" and self._first_expected == "key":
            self._sink("null")
            self._expected = "comma"

    @property
    def _first_expected(self) -> str:
        """What an item of the innermost brackets begins with."""
        return "key" if self._open and _KINDS[self._open[-1]][1] == "}" else "value"

    @property
    def _is_in_call(self) -> bool:
        return self._open == ["call"] and not self._num_spread

    def _begin_item(self, *, is_key: bool = True) -> None:
        """Write the comma before a key or value that begins, and what may be missing."""
        if self._expected == "comma":
            self._held = self._held or ", "
            self._expected = self._first_expected
        elif self._expected == "colon":
            self._sink(": ")
            self._expected = "value"
        self._sink(self._held)
        self._held = ""
        if self._expected == "key" and not is_key:
            position = next(self._positions, "") if self._is_in_call else ""
            self._key = position
            self._sink(f'"{_escaped(position)}": ')
            self._expected = "value"

    def _end_item(self) -> None:
        self._expected = "colon" if self._expected == "key" else "comma"

    def _word(self) -> Steps:
        pieces: list[str] = []
        yield from self._source.run(_WORD, pieces.append)
        word = "".join(pieces)
        if self._is_in_call and self._expected != "value":
            yield from self._source.spaces()
            self._begin_item(is_key=(yield from self._source.peek(_EQUALS)) is not None)
        else:
            self._begin_item()
        if self._expected == "key":
            self._key = word if len(self._open) == 1 else self._key
            self._sink(json.dumps(word, ensure_ascii=False))
        else:
            if self._open:  # a text without quotes may have more words
                yield from self._source.run(_BARE, pieces.append)
            text = "".join(pieces)
            word = text.rstrip()
            value = _json_word(word)
            convert = self._converter(is_quoted=False) if value[0] == '"' or self._quote != '"' else None
            self._sink(value if convert is None else convert(word))
            self._sink(text[len(word) :])
        self._end_item()

    def _converter(self, *, is_quoted: bool) -> Callable[[str], str] | None:
        """Return the converter of a text that comes next; None: it stays what it is."""
        if self._converters is None or self._expected != "value" or len(self._open) != 1:
            return None
        return self._converters(self._key, is_quoted)

    def _text_item(self, quote: str) -> Steps:
        """Read a text: a key, or a value that a converter may turn into another one."""
        convert = self._converter(is_quoted=True)
        if convert is None and (self._expected == "value" or len(self._open) != 1):
            is_closed = yield from self._text(quote, self._sink)
        else:
            pieces: list[str] = []
            is_closed = yield from self._text(quote, pieces.append)
            text = "".join(pieces)
            if is_closed and convert is None:
                self._key = json.loads(text)
            self._sink(text if convert is None or not is_closed else convert(json.loads(text)))
        if is_closed:
            self._end_item()

    def _text(self, quote: str, sink: Sink) -> Generator[None, None, bool]:
        """Read a text between two quotes. Returns False if the source ends in it."""
        source = self._source
        source.take(len(quote))
        sink('"')
        is_own = quote not in ('"', "'")
        after = _AFTER_KEY if self._expected == "key" else _AFTER_TEXT
        while True:
            yield from source.run(self._ends.plain, (lambda text: sink(_escaped(text))) if is_own else sink)
            if not source.buffer:
                if not source.is_cut:
                    sink('"')
                return not source.is_cut
            own_end = (yield from source.peek(self._quote_end)) if is_own else None
            if own_end is None and (yield from self._ends.ends_text(source)):
                sink('"')
                return True
            if is_own:
                mark = source.take(1 if own_end is None else len(quote))
            else:
                end = yield from source.peek(_TEXT_END)
                mark = source.take(1 if end is None else end.end())
            is_end = mark == quote
            if is_end and not is_own and self._open:  # models do not always escape those inside
                is_end = (yield from source.peek(after)) is not None or (source.is_last and not source.buffer.strip())
            if is_end:
                sink('"')
                return True
            sink(_escaped(mark) if is_own else _in_text(mark))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _in_text(mark: str) -> str:
    """Return a quote, a control character or an escape as JSON has it inside of a text."""
    if mark in ("'", "\\'"):
        return "'"
    if mark[:2] in ("\\x", "\\U"):
        return _escaped(chr(min(int(mark[2:], 16), sys.maxunicode)))
    is_json = mark[0] == "\\" and (len(mark) > 2 or mark[1:] in tuple(_OWN_ESCAPES))
    return mark if is_json else _escaped(mark)


def _json_word(word: str) -> str:
    """Return a value without quotes as JSON: a number, a constant, else a text."""
    if word in ("true", "false", "null") or _NUMBER.fullmatch(word):
        return word
    if word in _WORDS:
        return _WORDS[word]
    if len(word) <= MAX_NUMBER and not _CODE.match(word):
        with contextlib.suppress(ValueError, OverflowError):
            return json.dumps(int(word, 0) if _BASED.match(word) else float(word), allow_nan=False)
    return json.dumps(word, ensure_ascii=False)


def to_json(text: str) -> str | None:
    """Return `text`, all of which is one value as a model writes it, as JSON; None if it is not."""
    source, pieces = Source(), []
    source.buffer, source.is_last = text, True
    try:
        next(ValueReader(source, pieces.append).read())
    except StopIteration as end:
        return "".join(pieces) if end.value and not source.buffer.strip() else None
    raise AssertionError("all of the text is there")
