"""Text that comes in pieces, presented to its readers as if all of it were there.

A reader is a generator that takes what it can decide on, whatever may follow, and yields where the next piece may
change a decision: where the text is cut makes no difference. Every pattern that a reader waits for has a bounded
length, and longer text is passed on as it comes, so reading takes time linear in the length of the text.
"""

from collections.abc import Callable, Generator
from typing import Any

import regex

Steps = Generator[None, None, None]
Pattern = Any  # of `regex`, which can say that a text is the beginning of a match
Match = Any
Sink = Callable[[str], object]

PIECE = 4096
"""Most characters to add to a source at once: it copies its remaining text at each step."""

_SPACE_RUN = regex.compile(r"\s*")


def drop(_: str) -> None:
    """Take text that belongs to nothing."""


END = " " * 9
"""What a pattern that looks ahead finds behind the end of an answer: more white space than it waits for."""


class Cut(Exception):
    """Raised when the text is cut off after a mark has begun: that beginning is markup, and is not shown."""


class Source:
    """Text that has arrived and has not been taken.

    Attributes:
        buffer: that text.
        is_last: no more will come.
        is_cut: the text ends because it reached a limit, not because it is complete.
        taken, kept: what has been taken since this list was set; None if it is not recorded.
    """

    def __init__(self) -> None:
        self.buffer = ""
        self.is_last = False
        self.is_cut = False
        self.taken: list[str] | None = None
        self.kept: list[str] | None = None

    def take(self, length: int) -> str:
        """Take `length` characters."""
        text, self.buffer = self.buffer[:length], self.buffer[length:]
        for record in (self.taken, self.kept):
            if record is not None:
                record.append(text)
        return text

    def peek(self, pattern: Pattern) -> Generator[None, None, Match | None]:
        """Return the match of `pattern` at the beginning of the text, without taking it. Raises Cut.

        A pattern may look ahead at what ends it: behind the end of the answer it finds `END`.
        """
        while True:
            match = pattern.match(self.buffer, partial=not self.is_last or self.is_cut)
            if match is None and self.is_last and not self.is_cut:
                return self._at_end(pattern.match)
            if match is None or not match.partial:
                return match
            if self.is_last:
                raise Cut
            yield

    def is_rest_of(self, pattern: Pattern) -> bool:
        """Return true if the answer ends here, or in the beginning of a match of `pattern`."""
        if not self.is_last or self.is_cut:
            return False
        match = pattern.fullmatch(self.buffer, partial=True)
        return match is not None and match.partial

    def accept(self, pattern: Pattern) -> Generator[None, None, Match | None]:
        """Take the match of `pattern` at the beginning of the text, if there is one. Raises Cut."""
        match = yield from self.peek(pattern)
        if match is not None:
            self.take(len(match[0]))
        return match

    def _at_end(self, find: Callable[[str], Match | None]) -> Match | None:
        """Return the match that is found if white space follows the answer, and is in none of it."""
        match = find(self.buffer + END)
        return match if match is not None and match.end() <= len(self.buffer) else None

    def until(self, pattern: Pattern, sink: Sink) -> Generator[None, None, Match | None]:
        """Pass on the text before the first match of `pattern`, which is not taken; returns None if the text ends
        before.
        """
        while True:
            match = pattern.search(self.buffer, partial=not self.is_last or self.is_cut)
            if match is None and self.is_last and not self.is_cut:
                match = self._at_end(pattern.search)
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
        """Take white space; afterwards comes something else, or nothing."""
        pieces: list[str] = []
        yield from self.run(_SPACE_RUN, pieces.append)
        return "".join(pieces)
