"""The base of all parsers of a model's text: it comes in pieces, and where they are cut must make no difference.

A parser is a state machine over a buffer. A state looks at the buffer, takes what it can decide on whatever may follow,
and says whether it got anywhere; what cannot be decided yet stays, so that no beginning of a marker is ever shown.
"""

import abc
from collections.abc import Callable, Sequence

from jaxserve.server.parsing.events import Event, joined


class StreamParser(abc.ABC):
    """Reads one answer. `push` its text as it comes, then `finish`; both return what can be shown."""

    def __init__(self) -> None:
        self._buffer = ""
        self._is_last = False
        self._events: list[Event] = []
        self._state: Callable[[], bool] = self._start

    @abc.abstractmethod
    def _start(self) -> bool:
        """The first state. A state returns whether it took something, or handed over to another state; when it has not,
        it is asked again with more text, and a last time with `_is_last`.
        """

    @property
    def is_thinking(self) -> bool:
        """Whether what comes now is reasoning."""
        return False

    @property
    def has_thought(self) -> bool:
        """Whether no reasoning can come any more."""
        return True

    def push(self, text: str) -> list[Event]:
        """Read on."""
        self._buffer += text
        return self._run()

    def finish(self) -> list[Event]:
        """The text has ended, wherever that is."""
        self._is_last = True
        return self._run()

    def _run(self) -> list[Event]:
        while self._state():
            pass
        events, self._events = self._events, []
        return joined(events)

    def _emit(self, event: Event) -> None:
        self._events.append(event)

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken

    def _skip_spaces(self) -> None:
        self._buffer = self._buffer.lstrip()

    def _may_become(self, marker: str) -> bool:
        """Whether the buffer may still grow into something that starts with `marker`."""
        return not self._is_last and len(self._buffer) < len(marker) and marker.startswith(self._buffer)

    def _take_until(self, markers: Sequence[str]) -> tuple[str, str | None]:
        """The text before the first of the markers, and the marker, which is taken too; (what is certainly before one,
        None) while there is none.
        """
        found = [(position, marker) for marker in markers if (position := self._buffer.find(marker)) >= 0]
        if found:
            position, marker = min(found)
            before = self._take(position)
            self._take(len(marker))
            return before, marker
        held = 0 if self._is_last else max(held_length(self._buffer, marker) for marker in markers)
        return self._take(len(self._buffer) - held), None


def held_length(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
