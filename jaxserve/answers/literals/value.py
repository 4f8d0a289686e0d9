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
from collections.abc import Callable, Generator, Sequence

import msgspec
import regex

from jaxserve.answers.literals.source import PIECE, Sink, Source, Steps, drop
from jaxserve.answers.literals.text import ValueEnds, escaped, read_text

_WORD = regex.compile(r"[\w.+-]*")
_BARE = regex.compile(r"[^,{}()\[\]\"'`<\n]*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "NaN": "null", "Infinity": "null", "undefined": "null"}
_KINDS = {"{": ("}", "}"), "[": ("])", "]"), "(": ("])", "]"), "set": ("}", "]"), "call": ("}])", "}")}
"""What is open: the brackets that close it, and the one that does so in JSON."""

_BASED = re.compile(r"[+-]?0[xXoObB]")
_CODE = re.compile(r"[+-]?0\d")  # 02134 is no number
_SET = regex.compile(r"\{\s{0,64}+(?:\"[^\"\\\n]{0,200}+\"|'[^'\\\n]{0,200}+'|[\w.+-]{1,64}+)\s{0,64}+[,}]")
_EQUALS, _COLON = regex.compile("="), regex.compile("[:=]")
MAX_NUMBER = 1000
"""Characters of a number in Python's spelling, which takes the square of its length to read."""


@functools.lru_cache(maxsize=64)
def _tokens(quote: str) -> regex.Pattern:
    return regex.compile(rf"{regex.escape(quote)}|[\"'{{}}()\[\]:=,]|\*\*\s{{0,8}}+\{{|[\w.+/-]")


class ValueReader:
    """Reads one value from a source and passes it on as JSON.

    `quote` is a further quotation mark for texts. `ends` are the marks that end a value wherever they occur. A value
    that begins with `(` is the arguments of a Python call, which become an object; positional arguments get the names
    of `positions`. `converters` returns the function that converts the text of a key of the outermost object, which is
    in quotes or not, to a value; None: it stays what it is. Words that no colon makes a key are left out.
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
        self._ends = ends or ValueEnds()
        self._is_call = positions is not None
        self._positions = iter(positions or ())
        self._converters = converters
        self._key = ""  # of the outermost object
        self._open: list[str] = []  # keys of _KINDS
        self._num_spread = 0  # objects that are open, and whose items are arguments of the call: `**{`
        self._expected = "value"  # or "key", "colon", "comma"
        self._held = ""  # a comma, unless a bracket closes after it
        self._is_whole = True  # nothing has been left out

    def read(self) -> Generator[None, None, bool]:
        """Read to the value's end. Returns False if something has been left out, or if the text ends before, or
        something else follows: then, unless the text has been cut, the value is completed.
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
                return self._is_whole

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
            self._sink(f'"{escaped(position)}": ')
            self._expected = "value"

    def _end_item(self) -> None:
        self._expected = "colon" if self._expected == "key" else "comma"

    def _word(self) -> Steps:
        pieces: list[str] = []
        yield from self._source.run(_WORD, pieces.append)
        word = "".join(pieces)
        is_key = (self._first_expected if self._expected == "comma" else self._expected) == "key"
        if is_key:
            yield from self._source.spaces()
        if is_key and not self._is_in_call and (yield from self._source.peek(_COLON)) is None:
            yield from self._source.run(_BARE, drop)
            self._is_whole = False
            return
        if is_key and self._is_in_call:
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
        num_calls = self._open.count("(") + 1 if self._open[:1] == ["call"] else 0
        return read_text(
            self._source,
            sink,
            quote,
            ends=self._ends,
            is_key=self._expected == "key",
            is_whole=not self._open,
            num_calls=num_calls,
        )


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
    with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError):
        msgspec.json.decode(text)
        return text.strip()
    source, pieces = Source(), []
    reader = ValueReader(source, pieces.append).read()
    start = 0
    try:
        while True:
            source.buffer += text[start : start + PIECE]
            start += PIECE
            source.is_last = start >= len(text)
            next(reader)
    except StopIteration as end:
        return "".join(pieces) if end.value and not (source.buffer + text[start:]).strip() else None
