"""Proposer: the interface of whatever guesses the tokens that follow. It runs on the device, at the end of each step
that draws, and its guesses are verified by the next one.
"""

import abc
from typing import Any, NamedTuple

from jaxtyping import Array, Int


class NewTokens(NamedTuple):
    """The tokens that a step has appended to the sequences of R rows, up to Q each."""

    slots: Int[Array, " R"]
    """The slot of each row; out of range if nothing was appended."""
    token_ids: Int[Array, "R Q"]
    counts: Int[Array, " R"]
    """How many of a row's `token_ids` were appended: its first ones."""
    lengths: Int[Array, " R"]
    """Number of tokens of each sequence before."""


class Proposer(abc.ABC):
    """Guesses tokens for N slots, from a state that it keeps on the device: a pytree that is a part of the slots and
    donated with them.

    Instances are immutable and hashable: programs are compiled for them.
    """

    num_drafts: int
    """Largest number of tokens that it proposes for a row."""

    @abc.abstractmethod
    def init_state(self, *, num_slots: int, max_length: int) -> Any:
        """Return the state of slots without requests, for sequences of up to `max_length` tokens."""

    @abc.abstractmethod
    def admit(self, state: Any, slots: Int[Array, " R"], starts: Int[Array, " R"], token_ids: Int[Array, "R K"]) -> Any:
        """Return the state with tokens of new requests, from position `starts` of each slot on. Those behind the last
        one of a request are padding, and slots out of range change nothing.
        """

    @abc.abstractmethod
    def propose(self, state: Any, new: NewTokens) -> tuple[Any, Int[Array, "R k"], Int[Array, " R"]]:
        """Take in the new tokens of a step; return the state, the drafts that follow the last of each row, and how many
        of them count.
        """
