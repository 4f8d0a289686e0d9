"""StaticScheduler: batches of fixed membership, as servers worked before continuous batching; a baseline for
comparison.

Requests are admitted only when the previous batch has finished entirely. Prompts are padded on the left to the longest
one, so that all members start to decode together, and the batch keeps its shape until its last member is done. Every
member reserves blocks for `max_model_len` tokens: one contiguous run per KV group, used as a ring where the group has a
window.
"""

import itertools
from typing import override

from jaxserve.errors import ConfigError
from jaxserve.request import NO_BLOCK, Request, RequestStatus
from jaxserve.scheduling.base import Scheduler, SchedulerLimits, SchedulerStats
from jaxserve.scheduling.plan import Row, StepPlan
from jaxserve.scheduling.snapshot import BlocksSnapshot


class StaticScheduler(Scheduler):
    """No prefix sharing, preemption, or chunks next to decodes; `StepPlan.padded_tokens` accounts for the padding."""

    def __init__(self, limits: SchedulerLimits):
        super().__init__(limits)
        self._rings = self._needs.peaks(limits.max_model_len, chunk=limits.max_num_batched_tokens)
        """Blocks reserved per member in each KV group."""
        self._reservation = sum(self._rings)
        self._max_batch = min(
            limits.max_num_seqs, limits.max_num_batched_tokens, limits.num_blocks // self._reservation
        )
        if self._max_batch == 0:
            raise ConfigError(
                f"the static scheduler reserves {self._reservation} blocks for max_model_len={limits.max_model_len} "
                f"tokens a request, more than the {limits.num_blocks} of the KV cache"
            )
        self._batch_size = 0  # members of the batch, including finished ones
        self._num_columns = 0  # length of its longest prompt
        self._column = 0  # prompt columns already computed

    @override
    def schedule(self, max_tokens: int | None = None) -> StepPlan | None:
        assert max_tokens is None, "batches have the size that they are formed with"
        if not self._running:
            self._form_batch()
        rows: list[Row] = []
        padded_tokens = self._batch_size
        while self._column < self._num_columns and not rows:
            width = min(self._num_columns - self._column, self._limits.max_num_batched_tokens // self._batch_size)
            self._column += width
            padded_tokens = width * self._batch_size
            for request in self._running:
                end = self._column - (self._num_columns - request.num_prompt_tokens)
                if end > 0:
                    rows.append(self._extend(request, end))
        if not rows:
            rows = [
                self._extend(request, request.num_tokens)
                for request in self._running
                if request.num_tokens < request.max_total_tokens
            ]
        if not rows:
            return None
        rows.sort(key=lambda row: row.num_tokens > 1)
        plan = StepPlan(
            rows=rows,
            num_decode_rows=sum(row.num_tokens == 1 for row in rows),
            num_tokens=sum(row.num_tokens for row in rows),
            admitted=[row for row in rows if row.start == 0],
            padded_tokens=padded_tokens,
        )
        self._in_flight.append(plan)
        return plan

    @override
    def stats(self) -> SchedulerStats:
        num_reserved_blocks = self._batch_size * self._reservation if self._running else 0
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_preempted=0,
            num_free_blocks=self._limits.num_blocks - num_reserved_blocks,
            num_cached_blocks=0,
            kv_cache_usage=num_reserved_blocks / self._limits.num_blocks,
            kv_tokens_held=sum(self._num_held_tokens(request) for request in self._running),
            kv_positions_allocated=num_reserved_blocks * self._limits.block_size,
            num_preemptions=0,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            held_blocks=self._reserved_blocks(),
        )

    def _num_held_tokens(self, request: Request) -> int:
        num_given_back = sum(request.first_blocks) * self._limits.block_size
        return request.num_computed_tokens * len(self._rings) - num_given_back

    def _reserved_blocks(self) -> dict[int | None, int]:
        batch_size = self._batch_size if self._running else 0
        reserved = dict.fromkeys(self._limits.windows, 0)
        for window, ring in zip(self._limits.windows, self._rings, strict=True):
            reserved[window] += batch_size * ring
        return reserved

    @override
    def _blocks(self) -> BlocksSnapshot:
        ref_counts = [0] * self._limits.num_blocks
        for request in self._running:
            for block_id in request.held_blocks():
                ref_counts[block_id] += 1
        return BlocksSnapshot(ref_counts, [])

    @override
    def reset_prefix_cache(self) -> bool:
        return not self._running

    def _form_batch(self) -> None:
        batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
        for slot, request in enumerate(batch):
            request.slot = slot
            request.status = RequestStatus.RUNNING
        self._running = batch
        self._batch_size = len(batch)
        self._column = 0
        self._num_columns = max((request.num_prompt_tokens for request in batch), default=0)

    def _extend(self, request: Request, end: int) -> Row:
        self._drop_unseen(request)
        start = request.num_computed_tokens
        blocks = range(len(request.block_tables[0]), self._num_blocks(end))
        for table, ring in zip(request.block_tables, self._runs(request), strict=True):
            table += [ring[block % len(ring)] for block in blocks]
        request.num_computed_tokens = end
        samples = end == request.num_tokens
        request.num_pending += samples
        return Row(request, request.slot, start, end - start, samples, len(blocks))

    def _runs(self, request: Request) -> list[range]:
        """Return the blocks reserved for a member, per KV group."""
        ends = itertools.accumulate(self._rings, initial=request.slot * self._reservation)
        return [range(first, end) for first, end in itertools.pairwise(ends)]

    @override
    def _release(self, request: Request) -> None:
        request.clear_blocks()
        request.num_computed_tokens = 0
        request.slot = -1

    @override
    def _distrust(self, request: Request) -> None:
        """Do nothing: no blocks are shared."""

    @override
    def check_integrity(self) -> None:
        super().check_integrity()
        assert len(self._running) <= self._batch_size <= self._max_batch or not self._running
        for request in self._running:
            held = request.held_blocks()
            assert len(set(held)) == len(held), "a ring that is too short"
            for table, run in zip(request.block_tables, self._runs(request), strict=True):
                assert set(table) <= {NO_BLOCK, *run}
