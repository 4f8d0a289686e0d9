"""What a scheduler holds at one moment, for those who watch it: copied between two steps, turned into structs later."""

from typing import NamedTuple

import msgspec
import numpy as np

from jaxserve.request import Request

FREE, CACHED = 0, -1
"""States of a block that nobody holds; any other state is the number of its holders."""


class RequestSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One unfinished request, without its text. `slot` is -1 while it waits; `block_ids` are the blocks that it holds,
    in the order of the positions that they are for.

    Its prompt is computed as far as `num_computed_tokens` goes; `num_cached_tokens` of it came from the prefix cache.
    """

    request_id: str
    slot: int
    priority: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_preemptions: int
    block_ids: list[int]

    @classmethod
    def of(cls, request: Request) -> "RequestSnapshot":
        """A copy of what matters of `request`."""
        return cls(
            request_id=request.request_id,
            slot=request.slot,
            priority=request.priority,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_output_tokens=len(request.token_ids) - request.num_prompt_tokens,
            max_tokens=request.max_total_tokens - request.num_prompt_tokens,
            num_preemptions=request.num_preemptions,
            block_ids=request.held_blocks(),
        )


class BlocksSnapshot(NamedTuple):
    """Ref-count of every block, and the blocks that are cached though nobody holds them."""

    ref_counts: list[int]
    evictable: list[int]

    def runs(self) -> list[int]:
        """The state of every block, in order of ids, as run lengths: [state, count, state, count, ...]."""
        states = np.array(self.ref_counts, np.int32)
        states[self.evictable] = CACHED
        starts = np.flatnonzero(np.diff(states, prepend=states[:1] - 1))
        lengths = np.diff(starts, append=len(states))
        return np.stack([states[starts], lengths], axis=1).ravel().tolist()


class SchedulerSnapshot(NamedTuple):
    """Running requests in order of slots; the first of those that wait, in their order; the blocks."""

    running: list[RequestSnapshot]
    waiting: list[RequestSnapshot]
    blocks: BlocksSnapshot
