"""The base class of all readers of an answer: text is pushed in pieces, events come out."""

import abc
import contextlib
from collections.abc import Mapping
from typing import Any

from jaxserve.answers.literals.source import PIECE, Cut, Source, Steps
from jaxserve.answers.literals.unique import UniqueKeys
from jaxserve.answers.parsing.events import CallArguments, CallStart, Event, joined


class AnswerReader(abc.ABC):
    """Reads one answer: `push` its text as it comes, then `finish`; both return the events that are certain by then."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], *, max_calls: int | None):
        """`tools` are the schemas of the parameters of those that are offered. Calls beyond `max_calls` are dropped."""
        self._tools = tools
        self._max_calls = max_calls
        self._num_calls = 0
        self._source = Source()
        self._events: list[Event] = []
        self._arguments = self._unique_arguments()  # of the latest call
        self._steps = self._read()
        self.was_thought = False  # the text that was decided on last, which resembled a call, is reasoning

    @property
    @abc.abstractmethod
    def is_thinking(self) -> bool:
        """True if the next text is reasoning."""

    @property
    @abc.abstractmethod
    def may_think(self) -> bool:
        """True if reasoning can come now or later."""

    @property
    def is_undecided(self) -> bool:
        """True if the latest text may turn out to be a call, or only resemble one."""
        return self._source.taken is not None

    @abc.abstractmethod
    def _read_all(self) -> Steps:
        """Read the source to its end."""

    def push(self, text: str) -> list[Event]:
        """Read on."""
        for start in range(0, len(text), PIECE):
            self._source.buffer += text[start : start + PIECE]
            next(self._steps, None)
        return self._told()

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """End the text; `is_cut`: it has become too long."""
        self._source.is_last, self._source.is_cut = True, is_cut
        next(self._steps, None)
        self._arguments.finish()
        return self._told()

    def _read(self) -> Steps:
        with contextlib.suppress(Cut):
            yield from self._read_all()

    def _told(self) -> list[Event]:
        events, self._events = self._events, []
        return joined(events)

    def _start_call(self, name: str, call_id: str | None = None) -> None:
        self._arguments.finish()
        self._arguments = self._unique_arguments()
        self._num_calls += 1
        if self._max_calls is None or self._num_calls <= self._max_calls:
            self._events.append(CallStart(name, call_id))

    def _argue(self, text: str) -> None:
        """Report more of the arguments of the latest call."""
        if self._max_calls is None or self._num_calls <= self._max_calls:
            self._arguments.push(text)

    def _unique_arguments(self) -> UniqueKeys:
        return UniqueKeys(lambda text: self._events.append(CallArguments(text)))
