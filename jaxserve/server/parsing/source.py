"""Text that comes in pieces, as its readers see it: as if all of it was there.

A reader is a generator that takes what it can decide on, whatever may follow, and yields where the next piece may
change a decision: where the text is cut makes no difference. All patterns that are waited for are bounded, and what is
longer is handed on as it comes: reading takes time in proportion to the text.
"""

from collections.abc import Callable, Generator
from typing import Any

import regex

Steps = Generator[None, None, None]
Pattern = Any  # of `regex`, which can say that a text is the beginning of a match
Match = Any
Sink = Callable[[str], object]

_SPACE_RUN = regex.compile(r"\s*")


class Cut(Exception):
    """The text has been cut off where a mark had begun: that is markup, and shown to nobody."""


class Source:
    """Text that has come and has not been taken.

    Attributes:
        buffer: that text.
        is_last: no more will come.
        is_cut: the text ends because it has become too long, not because it is complete.
        taken: what has been taken since this list was set; None: nobody wants to know.
    """

    def __init__(self) -> None:
        self.buffer = ""
        self.is_last = False
        self.is_cut = False
        self.taken: list[str] | None = None

    def take(self, length: int) -> str:
        """Take so many characters."""
        text, self.buffer = self.buffer[:length], self.buffer[length:]
        if self.taken is not None:
            self.taken.append(text)
        return text

    def peek(self, pattern: Pattern) -> Generator[None, None, Match | None]:
        """Return the match of `pattern` at the beginning of what comes, which is not taken. Raises Cut."""
        while True:
            match = pattern.match(self.buffer, partial=not self.is_last or self.is_cut)
            if match is None or not match.partial:
                return match
            if self.is_last:
                raise Cut
            yield

    def accept(self, pattern: Pattern) -> Generator[None, None, Match | None]:
        """Take the match of `pattern` at the beginning of what comes, if there is one. Raises Cut."""
        match = yield from self.peek(pattern)
        if match is not None:
            self.take(len(match[0]))
        return match

    def until(self, pattern: Pattern, sink: Sink) -> Generator[None, None, Match | None]:
        """Hand on what comes before the first match of `pattern`, which is not taken; None: the text ends before."""
        while True:
            match = pattern.search(self.buffer, partial=not self.is_last or self.is_cut)
            end = len(self.buffer) if match is None else match.start()
            if end:
                sink(self.take(end))
            if match is not None and not match.partial:
                return match
            if self.is_last:
                self.take(len(self.buffer))  # the beginning of a mark that has been cut
                return None
            yield

    def run(self, pattern: Pattern, sink: Sink) -> Steps:
        """Hand on all characters from here that `pattern`, a repeated set of characters, matches."""
        while True:
            length = pattern.match(self.buffer).end()
            if length:
                sink(self.take(length))
            if self.buffer or self.is_last:
                return
            yield

    def spaces(self) -> Generator[None, None, str]:
        """Take white space; afterwards something else comes, or nothing."""
        pieces: list[str] = []
        yield from self.run(_SPACE_RUN, pieces.append)
        return "".join(pieces)
