"""One answer from its text: thoughts first, then words and calls."""

from collections.abc import Iterable

from jaxserve.server.parsing.events import CallArguments, CallStart, Content, Event, joined
from jaxserve.server.parsing.reasoning import ThinkParser
from jaxserve.server.parsing.tools import ToolParser

PIECE = 4096
"""Characters of a text that are read at once: parsers cut their buffers at every step, which takes a long one long."""


class AnswerParser:
    """Reads one answer of a model. `push` its text as it comes, then `finish`."""

    def __init__(
        self, *, thoughts: ThinkParser | None = None, calls: ToolParser | None = None, max_calls: int | None = None
    ):
        """`max_calls`: calls beyond are dropped."""
        self._thoughts = thoughts
        self._calls = calls
        self._max_calls = max_calls
        self._num_calls = 0

    def push(self, text: str) -> list[Event]:
        """What can be shown now."""
        pieces = (text[start : start + PIECE] for start in range(0, len(text), PIECE))
        return joined(self._limited(event for piece in pieces for event in self._read(piece)))

    def finish(self) -> list[Event]:
        """What has been held back, once the text has ended."""
        events = self._parsed([] if self._thoughts is None else self._thoughts.finish())
        if self._calls is not None:
            events += self._calls.finish()
        return joined(self._limited(events))

    def _read(self, text: str) -> list[Event]:
        return self._parsed([Content(text)] if self._thoughts is None else self._thoughts.push(text))

    def _parsed(self, events: Iterable[Event]) -> list[Event]:
        """Words may have calls among them."""
        result: list[Event] = []
        for event in events:
            if isinstance(event, Content) and self._calls is not None:
                result += self._calls.push(event.text)
            else:
                result.append(event)
        return result

    def _limited(self, events: Iterable[Event]) -> Iterable[Event]:
        for event in events:
            if isinstance(event, CallStart):
                self._num_calls += 1
            is_call = isinstance(event, CallStart | CallArguments)
            if not is_call or self._max_calls is None or self._num_calls <= self._max_calls:
                yield event
