"""StepPlan: decided by the scheduler, executed by the runner. Plain data, no jax."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.request import Request


class Row(NamedTuple):
    """One request's part of a step: its tokens [start, start + num_tokens) are computed.

    `samples` is true if they reach the end of the sequence, so that a next token is drawn. `num_new_blocks` is the
    number of ids at the end of each of its block tables that were allocated for this step. A row that samples and has
    one token may also verify up to `num_drafts` drafts, and draws a token more for each that is accepted. While such
    rows are in flight, `start` is the least position at which the request's next row can begin.
    """

    request: Request
    slot: int
    start: int
    num_tokens: int
    samples: bool
    num_new_blocks: int
    num_drafts: int = 0


class Drafted(NamedTuple):
    """The result of a row besides its tokens, with speculation."""

    num_verified: int
    """Number of drafts that it verified."""
    proposed: list[int]
    """The drafts that the request's next row may verify."""


NO_DRAFT = Drafted(0, [])
"""The result of a row that has verified no draft, and behind which none is proposed."""


class StateCopy(NamedTuple):
    """A copy between what layers keep of a slot and one of the states that are kept for the prefix cache."""

    slot: int
    place: int


class StepPlan(NamedTuple):
    """One step of the device.

    `rows` begins with the requests that compute exactly one token (`num_decode_rows` of them). `admitted` are the
    rows (also in `rows`) of requests that have just got their slot: their whole slot state, including the block table,
    must be written before the step. `padded_tokens` is a lower bound on the shape that the step runs with: 0, except
    under the static scheduler, which pays for its padding. Before the step, the slots of `resumed` get states that were
    kept, and those of `passed` are copied; behind it, those of `kept` are.
    """

    rows: list[Row]
    num_decode_rows: int
    num_tokens: int
    admitted: list[Row]
    padded_tokens: int = 0
    resumed: Sequence[StateCopy] = ()
    passed: Sequence[StateCopy] = ()
    kept: Sequence[StateCopy] = ()
