"""The events that a model's text is parsed into, piece by piece: thoughts, words, and tool calls."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Words for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Thoughts before or between words and calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of the tool `name` begins. `id` is the id that the model itself wrote, if its syntax has ids."""

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the call that began last: JSON text."""

    text: str


Event = Content | Reasoning | CallStart | CallArguments


def joined(events: Iterable[Event]) -> list[Event]:
    """Return the same events, with neighbours of one kind made one, and without empty ones."""
    result: list[Event] = []
    told = (event for event in events if isinstance(event, CallStart) or event.text)
    for kind, group in itertools.groupby(told, key=type):
        neighbours = list(group)
        if kind is CallStart or len(neighbours) == 1:
            result += neighbours
        else:
            result.append(kind("".join(event.text for event in neighbours if not isinstance(event, CallStart))))
    return result
