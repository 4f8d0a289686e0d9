"""StaticScheduler: batches of fixed membership, the way servers worked before continuous batching.

The baseline to compare with. Requests are taken up only when the batch before has finished entirely; prompts are
padded on the left to the longest one, so that all members start to decode together; the batch keeps its shape until its
last member is done; and every member reserves one contiguous run of blocks for `max_model_len` tokens.
"""

from typing import override

from jaxserve.errors import ConfigError
from jaxserve.request import Request, RequestStatus
from jaxserve.scheduling.base import Scheduler, SchedulerLimits, SchedulerStats
from jaxserve.scheduling.plan import Row, StepPlan


class StaticScheduler(Scheduler):
    """No sharing, no preemption, no chunk beside a decode; `StepPlan.padded_tokens` says what the padding costs."""

    def __init__(self, limits: SchedulerLimits):
        super().__init__(limits)
        self._reservation = self._num_blocks(limits.max_model_len)  # blocks a member
        self._max_batch = min(
            limits.max_num_seqs, limits.max_num_batched_tokens, limits.num_blocks // self._reservation
        )
        if self._max_batch == 0:
            raise ConfigError(
                f"the static scheduler reserves max_model_len={limits.max_model_len} tokens a request, "
                f"more than the {limits.num_blocks * limits.block_size} of the KV cache"
            )
        self._batch_size = 0  # members of the batch, finished ones included
        self._num_columns = 0  # its longest prompt
        self._column = 0  # prompt columns already computed

    @override
    def schedule(self) -> StepPlan | None:
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
            admitted=[row.request for row in rows if row.start == 0],
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
            kv_cache_usage=num_reserved_blocks / self._limits.num_blocks,
            kv_tokens_held=sum(request.num_computed_tokens for request in self._running),
            kv_positions_allocated=num_reserved_blocks * self._limits.block_size,
            num_preemptions=0,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
        )

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
        start = request.num_computed_tokens
        num_held = len(request.block_ids)
        first = request.slot * self._reservation
        request.block_ids += range(first + num_held, first + self._num_blocks(end))
        request.num_computed_tokens = end
        samples = end == request.num_tokens
        request.num_pending += samples
        return Row(request, request.slot, start, end - start, samples, len(request.block_ids) - num_held)

    @override
    def _release(self, request: Request) -> None:
        request.block_ids = []
        request.num_computed_tokens = 0
        request.slot = -1

    @override
    def _distrust(self, request: Request) -> None:
        """Nothing is shared here."""

    @override
    def check_integrity(self) -> None:
        super().check_integrity()
        assert len(self._running) <= self._batch_size <= self._max_batch or not self._running
        for request in self._running:
            first = request.slot * self._reservation
            assert request.block_ids == list(range(first, first + len(request.block_ids)))
            assert len(request.block_ids) <= self._reservation
