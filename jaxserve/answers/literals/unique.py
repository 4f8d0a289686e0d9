"""Gives each key of the objects in a JSON text one value, while the text is written."""

import json
from dataclasses import dataclass, field

import regex

from jaxserve.answers.literals.source import Sink

MAX_HELD = 256
"""Characters at the beginning of a text that are held back: a key that is written once more replaces its value."""

_MARK = regex.compile(r"[\"{}\[\],:]")
_IN_TEXT = regex.compile(r"(?:[^\"\\]|\\.)*+", regex.DOTALL)


@dataclass
class _Open:
    """An object or a list that is open.

    Attributes:
        is_object: true for an object.
        spans: for each key, where the pieces of its value begin and end.
        key, start: the latest key, and where its value begins.
        again: pieces of that value if the key had one before; None: it had none.
        output: where other pieces went before these.
    """

    is_object: bool
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    key: str = ""
    start: int = 0
    again: list[str] | None = None
    output: list[str] = field(default_factory=list)


class UniqueKeys:
    """Passes on the text of a JSON object, with one value for each key.

    The last value counts, as in other readers of JSON, and stands where the first one was. What comes after MAX_HELD
    characters is passed on while it is written, and replaces nothing any more: there the first value counts.
    """

    def __init__(self, sink: Sink):
        """Pass the text on to `sink`."""
        self._sink = sink
        self._open: list[_Open] = []
        self._held: list[str] = []
        self._output = self._held  # or the pieces of a value whose key had one before
        self._length = 0  # of all that was passed on or is held back
        self._key: list[str] | None = None  # from the comma before a key to its colon; None: a value is read
        self._is_text = False  # between two quotes
        self._rest = ""  # a backslash whose escape has been cut

    def push(self, text: str) -> None:
        """Take more of the text."""
        if self._is_text and self._is_passing and not self._rest and '"' not in text and "\\" not in text:
            self._sink(text)
            return
        text, self._rest = self._rest + text, ""
        position = 0
        while position < len(text):
            if self._is_text:
                plain = _IN_TEXT.match(text, position)
                end = position if plain is None else plain.end()
                self._write(text[position:end])
                if text[end:] == "\\":
                    self._rest = "\\"
                    break
                if end < len(text):
                    self._write('"')
                    self._is_text = False
                position = end + 1
                continue
            mark = _MARK.search(text, position)
            end = len(text) if mark is None else mark.start()
            self._write(text[position:end])
            if mark is not None:
                self._take(mark[0])
            position = end + 1
        if not self._open or self._is_passing:
            self._flush()

    def finish(self) -> None:
        """Pass on the rest of a text that has no end."""
        if self._key is not None:
            self._output.append("".join(self._key))
        self._flush()

    def _take(self, mark: str) -> None:
        """Take one mark outside of texts."""
        innermost = self._open[-1] if self._open else _Open(is_object=False)
        if innermost.is_object and mark in ",}" and self._key is None:
            self._end_value(innermost)
        if innermost.is_object and mark == ",":
            self._key = []
        elif innermost.is_object and mark == ":" and self._key is not None:
            self._begin_value(innermost)
            return
        elif mark in "}]" and self._open:
            self._output.extend(self._key or ())
            self._key = None
            self._open.pop()
        self._write(mark)
        if mark == '"':
            self._is_text = True
        elif mark in "{[":
            self._open.append(_Open(is_object=mark == "{"))
            self._key = [] if mark == "{" else None

    def _begin_value(self, innermost: _Open) -> None:
        """Begin to read a key's first value, or a further one."""
        written, self._key = "".join(self._key or ()), None
        innermost.key = json.loads(written[written.index('"') :].rstrip())
        if innermost.key in innermost.spans:
            innermost.output, innermost.again = self._output, []
            self._output = innermost.again
            return
        self._write(written + ":")
        innermost.start = len(self._output)

    def _end_value(self, innermost: _Open) -> None:
        """Keep where the key's first value is, or replace it."""
        again, innermost.again = innermost.again, None
        if again is None:
            innermost.spans[innermost.key] = (innermost.start, len(self._output))
            return
        self._output = innermost.output
        if self._length <= MAX_HELD:
            start, end = innermost.spans[innermost.key]
            self._output[start:end] = ["".join(again), *[""] * (end - start - 1)]

    @property
    def _is_passing(self) -> bool:
        """True if text is passed on at once."""
        return self._length > MAX_HELD and self._output is self._held and self._key is None

    def _write(self, text: str) -> None:
        if self._key is not None:
            self._key.append(text)
            return
        self._output.append(text)
        if self._output is self._held:
            self._length += len(text)

    def _flush(self) -> None:
        """Pass on what is held back."""
        text = "".join(self._held)
        self._held.clear()
        if text:
            self._sink(text)
