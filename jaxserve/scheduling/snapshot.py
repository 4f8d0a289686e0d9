"""A scheduler's state at one moment, for monitoring: copied between two steps, encoded later."""

from typing import NamedTuple

import msgspec

from jaxserve.request import Request

FREE, CACHED = 0, -1
"""States of an unreferenced block; any other state is the number of its holders."""


class RequestSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One unfinished request, without its text.

    `slot` is -1 while it waits; `block_ids` are the blocks that it holds, in order of their positions. KV is computed
    for its first `num_computed_tokens` tokens, and `num_cached_tokens` of these came from the prefix cache.
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
        """Copy the reported fields of `request`."""
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
    """Ref-count of every block, and the blocks that are cached but held by no request."""

    ref_counts: list[int]
    evictable: list[int]

    def runs(self) -> list[int]:
        """Encode the state of every block, in order of ids, as run lengths: [state, count, state, count, ...]."""
        import numpy as np  # not for the server's parent, which needs no arrays and starts sooner without them

        states = np.array(self.ref_counts, np.int32)
        states[self.evictable] = CACHED
        starts = np.flatnonzero(np.diff(states, prepend=states[:1] - 1))
        lengths = np.diff(starts, append=len(states))
        return np.stack([states[starts], lengths], axis=1).ravel().tolist()


class SchedulerSnapshot(NamedTuple):
    """Running requests in order of slots; the first waiting requests in key order; the blocks."""

    running: list[RequestSnapshot]
    waiting: list[RequestSnapshot]
    blocks: BlocksSnapshot
