"""Scheduler: the interface of all schedulers. It takes in requests, returns a StepPlan per step, and takes back tokens.

This module implements a request's life cycle (queue, slot, tokens, finish); `continuous` and `static` decide what goes
into a step.
"""

import abc
import dataclasses
import enum
import itertools
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from jaxserve.errors import CapacityExceeded, ConfigError, ContextLengthExceeded, InvalidRequest
from jaxserve.request import NO_BLOCK, EngineRequest, FinishReason, Request, RequestStatus
from jaxserve.scheduling.block_needs import BlockNeeds
from jaxserve.scheduling.drafting import NO_DRAFTS, DraftPolicy
from jaxserve.scheduling.plan import NO_DRAFT, Drafted, StepPlan
from jaxserve.scheduling.snapshot import BlocksSnapshot, RequestSnapshot, SchedulerSnapshot


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """The resources and policy of a scheduler."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: Literal["fcfs", "priority"] = "fcfs"
    windows: tuple[int | None, ...] = (None,)
    """The window of each KV group, see BlockNeeds."""
    drafts: DraftPolicy = NO_DRAFTS
    """How many drafts each row may verify in a step."""
    has_states: bool = False
    """True if layers keep states by slot: then a request starts from what another has computed only where there is a
    copy of the state.
    """
    num_kept_states: int = 0
    """Number of these copies."""
    min_kept_tokens: int = 128
    """A copy must save so many tokens: to make one, a prompt is computed in one step more, which is as long as that of
    so many tokens.
    """
    num_stages: int = 1
    """Number of plans that devices work on at a time, each with rows of other requests."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def needs(self) -> BlockNeeds:
        """The block counts of requests under these limits."""
        return BlockNeeds(windows=self.windows, block_size=self.block_size, max_chunk=self.max_num_batched_tokens)


class SchedulerStats(NamedTuple):
    """Gauges at this moment, then counters since the start; prefix cache queries and hits count prompt tokens.

    A token has one KV position in each KV group that still holds it. `held_blocks` counts the blocks of running
    requests by the window of their layers, `num_cached_blocks` those referenced by the prefix cache only.
    `num_preempted` of the waiting requests have run before.
    """

    num_running: int
    num_waiting: int
    num_preempted: int
    num_free_blocks: int
    num_cached_blocks: int
    kv_cache_usage: float
    kv_tokens_held: int
    kv_positions_allocated: int
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    held_blocks: dict[int | None, int]


class RowOutcome(enum.Enum):
    """The result of `update` for one row of a step.

    TOKEN: its tokens were appended. LAST_TOKEN: its tokens were appended and the request is finished; if its
    `finish_reason` is "stop", the last of them is the stop token. CHUNK: part of a sequence was computed, nothing was
    sampled. FAILED: its numbers were not finite; the request is finished with `finish_reason` "error". DROPPED: the
    request had finished before the row came back (a stop token one step earlier, an abort), so its tokens are
    discarded.
    """

    TOKEN = enum.auto()
    LAST_TOKEN = enum.auto()
    CHUNK = enum.auto()
    FAILED = enum.auto()
    DROPPED = enum.auto()


class Scheduler(abc.ABC):
    """The owner of every unfinished request. Called by one thread only, except for `check_admissible` and
    `num_waiting`.

    The caller executes every plan that `schedule` returns, in order, and reads the requests' block tables for it before
    it calls anything else; then it hands each plan to `update`, oldest first. Any number of plans may be in flight in
    between. `add`, `abort` and `fail` may be called at any time.

    Requests are ordered by (priority, arrival), or by arrival alone under "fcfs": `_waiting` and `_running` are lists
    sorted by this key, which is unique.
    """

    def __init__(self, limits: SchedulerLimits):
        self._limits = limits
        self._needs = limits.needs
        self._windowed = [group for group, window in enumerate(limits.windows) if window is not None]
        self._one_of_each_window = [
            (window, limits.windows.index(window)) for window in dict.fromkeys(limits.windows) if window is not None
        ]
        self._by_priority = limits.policy == "priority"
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._num_preempted = 0  # preempted requests in `_waiting`
        self._in_flight: deque[StepPlan] = deque()
        self._num_arrived = 0

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished. When no plan is in flight, `schedule` then returns one."""
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Number of requests waiting to run, or to run again, at this moment. Thread-safe."""
        return len(self._waiting)

    def check_admissible(self, request: EngineRequest) -> None:
        """Check that this request could run here if it were alone. Pure and thread-safe.

        Raises InvalidRequest, ContextLengthExceeded or CapacityExceeded.
        """
        limits = self._limits
        num_prompt_tokens = len(request.prompt_token_ids)
        total = num_prompt_tokens + request.max_tokens
        total_in_context = num_prompt_tokens if request.pooling else total  # an embedding's drawn token is discarded
        if num_prompt_tokens < 1:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if request.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, got {request.max_tokens}", param="max_tokens")
        if total_in_context > limits.max_model_len:
            raise ContextLengthExceeded.beyond(
                limits.max_model_len,
                f"{num_prompt_tokens} prompt tokens and max_tokens={request.max_tokens} make {total}",
                param="max_tokens" if num_prompt_tokens < limits.max_model_len else "prompt",
            )
        num_blocks = self._needs.peak(total - 1)  # the last token's KV is never needed
        if num_blocks > limits.num_blocks:
            raise CapacityExceeded(
                f"the request may grow to {num_blocks} KV blocks, over the {limits.num_blocks} of this engine",
                param="max_tokens",
                code="capacity_exceeded",
            )

    def add(self, engine_requests: list[EngineRequest]) -> list[Request]:
        """Queue all of these requests or none. The `n` siblings of a prompt must come in one call.

        Raises InvalidRequest for an id that is in use, and what `check_admissible` raises.
        """
        limits = self._limits
        ids = {request.request_id for request in engine_requests}
        if len(ids) < len(engine_requests) or not ids.isdisjoint(self._requests):
            raise InvalidRequest("a request of this id is running already", param="request_id")
        for request in engine_requests:
            self.check_admissible(request)
        requests = []
        for engine_request in engine_requests:
            request = Request(
                engine_request,
                arrival=self._num_arrived,
                num_groups=len(limits.windows),
                takes_drafts=bool(limits.drafts.by_rows) and engine_request.may_take_drafts,
            )
            self._num_arrived += 1
            if not self._by_priority:
                request.priority = 0  # the key is then the arrival alone
            self._requests[request.request_id] = request
            insort(self._waiting, request, key=request_key)
            requests.append(request)
        return requests

    @abc.abstractmethod
    def schedule(self, max_tokens: int | None = None) -> StepPlan | None:
        """Decide the next step, of at most `max_tokens` tokens if that is less than `max_num_batched_tokens`. None if
        nothing can run before a plan in flight has come back, or there is nothing to run.
        """

    def update(
        self,
        plan: StepPlan,
        sampled_token_ids: Sequence[list[int]],
        ok: Sequence[bool] | None = None,
        drafted: Sequence[Drafted] | None = None,
        *,
        seconds: float | None = None,
    ) -> list[RowOutcome]:
        """Process the results of the oldest plan in flight; return one outcome per row.

        `sampled_token_ids` has a list for each row, ignored where a row does not sample: its tokens, one and one for
        each draft that was accepted, or none if the request had reached its last token before. A list is cut, in place,
        after a stop token. `ok` says which rows' numbers were finite, None that all were. `drafted` says what became of
        each row's drafts, None that no row has verified or proposed any, and `seconds` what the step took, if that is
        known. Requests finish here: at a stop token ("stop"), at their last token ("length"), or because a row is not
        ok ("error").
        """
        oldest = self._in_flight.popleft()
        assert oldest is plan, "plans come back in the order they were made"
        if (drafts := self._limits.drafts).by_rows:
            drafts.observe_step(plan, sampled_token_ids, seconds)
            for row, one, new in zip(plan.rows, drafted or [NO_DRAFT] * len(plan.rows), sampled_token_ids, strict=True):
                request = row.request
                if (drafted or request.proposed) and row.samples and request.takes_drafts and request.slot == row.slot:
                    drafts.observe(request, row.num_drafts, one, new)
        failed = set() if ok is None or all(ok) else self._fail_rows(plan, ok)
        finished = RequestStatus.FINISHED
        chunk, one_token, last_token = RowOutcome.CHUNK, RowOutcome.TOKEN, RowOutcome.LAST_TOKEN
        outcomes: list[RowOutcome] = []
        for (request, _, _, _, samples, _, num_drafts), new in zip(plan.rows, sampled_token_ids, strict=True):
            if samples:
                request.num_pending -= 1
                request.num_pending_drafts -= num_drafts
            if request.status is finished:
                outcomes.append(RowOutcome.FAILED if request in failed else RowOutcome.DROPPED)
            elif not samples:
                outcomes.append(chunk)
            else:
                token_ids, stops = request.token_ids, request.asked.stop_token_ids
                if len(new) > 1:
                    _cut_after_stop(new, stops)
                    if request.slot >= 0:  # else it was preempted, and all will be computed again
                        # The last token is never computed, even if more rows are in flight than it needed.
                        num_computed = request.num_computed_tokens + len(new) - 1
                        request.num_computed_tokens = min(num_computed, request.max_total_tokens - 1)
                token_ids += new
                if token_ids[-1] in stops:
                    self._finish(request, "stop")
                elif len(token_ids) == request.max_total_tokens:
                    self._finish(request, "length")
                else:
                    outcomes.append(one_token)
                    continue
                outcomes.append(last_token)
        return outcomes

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """Finish these requests ("abort") and release what they hold; return those that were unfinished.

        Their rows in flight still run, and their results are dropped. Unknown ids are ignored.
        """
        aborted = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, "abort")
                aborted.append(request)
        return aborted

    @abc.abstractmethod
    def stats(self) -> SchedulerStats:
        """Return gauges and counters. Linear in the running requests."""

    def snapshot(self, *, max_waiting: int) -> SchedulerSnapshot:
        """Copy the current state, with at most `max_waiting` waiting requests. Linear in requests and blocks."""
        running = [RequestSnapshot.of(request) for request in self._running]
        waiting = [RequestSnapshot.of(request) for request in self._waiting[:max_waiting]]
        return SchedulerSnapshot(sorted(running, key=lambda one: one.slot), waiting, self._blocks())

    @abc.abstractmethod
    def _blocks(self) -> BlocksSnapshot:
        """Copy the state of every block."""

    @abc.abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Drop every cached prefix. Returns false, and does nothing, while a request is running."""

    @abc.abstractmethod
    def _release(self, request: Request) -> None:
        """Release the slot and the blocks of a request that stops running."""

    @abc.abstractmethod
    def _distrust(self, request: Request) -> None:
        """Drop from the prefix cache whatever this request may have written."""

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.block_size)

    def _has_unseen(self, request: Request) -> bool:
        """Return true if `_drop_unseen` would drop a block. Must be fast: it runs for every request at every step."""
        for window, group in self._one_of_each_window:
            oldest = request.num_computed_tokens - window + 1
            if oldest // self._limits.block_size > request.first_blocks[group]:
                return True
        return False

    def _drop_unseen(self, request: Request) -> list[int]:
        """Drop from the request's block tables the blocks that no future token attends to; return their ids."""
        dropped = []
        for group in self._windowed:
            first, held = self._needs.first_block(group, request.num_computed_tokens), request.first_blocks[group]
            if first > held:
                table = request.block_tables[group]
                dropped += table[held:first]
                table[held:first] = [NO_BLOCK] * (first - held)
                request.first_blocks[group] = first
        return dropped

    def _fail_rows(self, plan: StepPlan, ok: Sequence[bool]) -> set[Request]:
        """Finish the requests of the rows that are not ok ("error"), and drop their blocks from the prefix cache, since
        their KV cannot be trusted; return those that were unfinished until now.

        A finished request is distrusted too: an abort does not make its blocks valid.
        """
        failed = set()
        for row, row_ok in zip(plan.rows, ok, strict=True):
            if not row_ok:
                self._distrust(row.request)
                if row.request.status is not RequestStatus.FINISHED:
                    self._finish(row.request, "error")
                    failed.add(row.request)
        return failed

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        if request.status is RequestStatus.RUNNING:
            _remove(self._running, request)
            self._release(request)
        else:
            _remove(self._waiting, request)
            self._num_preempted -= request.status is RequestStatus.PREEMPTED
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]

    def check_integrity(self) -> None:
        """Assert every invariant that can be stated. For tests: linear in all state."""
        limits = self._limits
        waiting, running = self._waiting, self._running
        for queue in (waiting, running):
            keys = [(request.priority, request.arrival) for request in queue]
            assert all(a < b for a, b in itertools.pairwise(keys)), "a queue is not strictly ordered"
        assert self._requests == {request.request_id: request for request in [*waiting, *running]}
        assert len(self._requests) == len(waiting) + len(running), "a request is in two queues"
        assert len(running) <= limits.max_num_seqs
        assert self._num_preempted == sum(request.status is RequestStatus.PREEMPTED for request in waiting)
        slots = [request.slot for request in running]
        assert len(set(slots)) == len(slots), "two requests in one slot"
        assert all(0 <= slot < limits.max_num_seqs for slot in slots)

        for plan in self._in_flight:
            counts = [row.num_tokens for row in plan.rows]
            assert counts == [1] * plan.num_decode_rows + [n for n in counts if n > 1], "rows are out of order"
            num_drafts = sum(row.num_drafts for row in plan.rows)
            assert sum(counts) == plan.num_tokens <= limits.max_num_batched_tokens - num_drafts
            assert not num_drafts or plan.num_decode_rows == len(counts), "drafts beside rows of several tokens"
            assert all(row.samples and row.request.takes_drafts for row in plan.rows if row.num_drafts)
            assert len({id(row.request) for row in plan.rows}) == len(counts), "a request has two rows"
            assert len({row.slot for row in plan.rows}) == len(counts), "two rows in one slot"
        in_flight = Counter(dict.fromkeys(self._requests.values(), 0))
        in_flight.update(row.request for plan in self._in_flight for row in plan.rows if row.samples)
        drafts = Counter(dict.fromkeys(self._requests.values(), 0))
        for row in itertools.chain.from_iterable(plan.rows for plan in self._in_flight):
            drafts[row.request] += row.num_drafts
        for request, num_rows in in_flight.items():
            assert request.num_pending == num_rows, "num_pending differs from the rows in flight"
            assert request.num_pending_drafts == drafts[request], "num_pending_drafts differs from the rows in flight"
        for request in self._requests.values():
            self._check_request(request)

    def _check_request(self, request: Request) -> None:
        num_known, num_computed = len(request.token_ids), request.num_computed_tokens
        num_tokens = num_known + request.num_pending
        assert request.finish_reason is None
        assert num_known < request.max_total_tokens, "a request at its limit still lives"
        # Rows in flight that were planned before drafts were accepted may be too many: the device leaves them out.
        assert num_tokens <= request.max_total_tokens or (request.takes_drafts and request.num_pending > 1)
        assert request.max_total_tokens - bool(request.asked.pooling) <= self._limits.max_model_len
        for group, (table, first) in enumerate(zip(request.block_tables, request.first_blocks, strict=True)):
            least = most = num_computed
            if request.takes_drafts and request.slot >= 0:
                least, most = num_computed + request.num_pending_drafts, num_computed + self._needs.max_chunk - 1
            limit = max(num_computed, request.max_total_tokens - 1)
            num_blocks = [self._num_blocks(min(bound, limit)) for bound in (least, most)]
            assert num_blocks[0] <= len(table) <= num_blocks[1], "a block table is not what was computed"
            assert table[:first] == [NO_BLOCK] * first
            assert NO_BLOCK not in table[first:]
            window = self._limits.windows[group]
            assert first == 0 or first <= self._needs.first_block(group, num_computed), (
                "a block is given back too early"
            )
            if window is not None:
                most = self._needs.most_of_window(window, chunk=self._needs.max_chunk)
                assert len(table) - first <= most, "a block is kept too long"
        if request.status is RequestStatus.RUNNING:
            assert request in self._running
            assert 0 <= num_computed < num_tokens
            num_pending = min(request.num_pending, request.max_total_tokens - num_known)  # of more, none draws
            assert num_pending in (0, num_computed + 1 - num_known), "a token is out of turn"
        else:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert request in self._waiting
            assert request.slot == -1
            assert num_computed == 0
            assert request.num_pending == 0 or request.status is RequestStatus.PREEMPTED


def request_key(request: Request) -> tuple[int, int]:
    """Return the sort key of a request: a strict total order, the least of which runs first."""
    return request.priority, request.arrival


def _cut_after_stop(token_ids: list[int], stops: frozenset[int]) -> None:
    for index, token_id in enumerate(token_ids):
        if token_id in stops:
            del token_ids[index + 1 :]
            return


def _remove(queue: list[Request], request: Request) -> None:
    index = bisect_left(queue, request_key(request), key=request_key)
    assert queue[index] is request
    del queue[index]
