"""What a model's text turns out to be, piece by piece: thoughts, words, and calls of tools."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple


class Content(NamedTuple):
    """Words for the reader."""

    text: str


class Reasoning(NamedTuple):
    """Thoughts before the answer."""

    text: str


class CallStart(NamedTuple):
    """A call of the tool `name` begins."""

    name: str


class CallArguments(NamedTuple):
    """More of the arguments of the call that began last: JSON text."""

    text: str


Event = Content | Reasoning | CallStart | CallArguments


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events, with neighbours of one kind made one, and without empty ones."""
    result: list[Event] = []
    told = (event for event in events if isinstance(event, CallStart) or event.text)
    for kind, group in itertools.groupby(told, key=type):
        neighbours = list(group)
        if kind is CallStart or len(neighbours) == 1:
            result += neighbours
        else:
            result.append(kind("".join(text for (text,) in neighbours)))
    return result
