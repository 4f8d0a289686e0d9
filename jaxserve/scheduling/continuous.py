"""ContinuousScheduler: decide anew at every step who computes how many tokens, in which blocks, and who is preempted.

There is no prefill or decode phase: each running request's `num_computed_tokens` catches up with its `num_tokens`.

Why no request waits forever. The key is a strict total order of requests. The running request with the least key always
progresses: its row is first in the budget, and to get a block it may preempt every other request; alone it fits, or
`add` would have refused it. So running requests finish. Waiting ones are admitted in key order only, so that the first
of them is admitted when the pool is empty, if not before. By induction over the key every request finishes, under
"priority" as long as no more requests of better priority arrive.

Why admission need not look ahead. A row that does not reach the end of its sequence has used up the budget, so no
request is admitted while a running one lacks blocks for tokens it has. Siblings (n > 1) come after their first, and for
the same reason not before its whole prompt is scheduled: they find its blocks in the cache.

Why late writes do no harm. The device runs steps in order. A row writes only at positions >= its start, into blocks
that were held by its request alone, and were not cached, when the row was scheduled (`check_integrity`). If the request
loses such a block while the row is in flight, the next holder writes in a later step. A block enters the cache only
when the step that fills it is scheduled and its tokens are known, so that whatever is still in flight for the block
writes exactly what its hash stands for. Rows of the same step may read it too if some row has several tokens: each
layer then writes all K and V of the step before it attends. In a step of one token per row, and with blocks of more
than one token, no row attends to what another writes: a token that fills a block is not indexed before the next step,
unless the budget cut its row off there, and then nobody is admitted after it.

Why drafts need no way back. While rows with drafts are in flight, a request's length is an interval: at least
`num_tokens`, and longer by what is accepted of `num_pending_drafts`. Its blocks are for the greatest length; what is
indexed, and what leaves a window, is so for the least. A row in flight writes at positions from the least length on
that it can begin at, so whatever it writes to a block in the cache is what the block's hash stands for. Rejected drafts
leave KV behind the sequence, to which no token attends before another one is written there. As the device knows each
request's limit, it never writes beyond the last token's predecessor, for which there is a block.

Why blocks outside a window can be released while the request runs. They are released when a step is planned, before any
request in it gets blocks, and only if no token from there on attends to them. Steps in flight that still attend to them
run before the step in which the next holder writes. Their ids remain in the request's block table on the device without
effect: attention lets nothing from outside a window into its result.

Why a state that was kept is the right one. A request that has `keep_at` computes up to there in one step and goes on in
a later one. The copy is made behind the first, whose tokens are known, and may be used by steps that are planned after
it. That of an answer is made before the step of the next token, when those of the full blocks before it are known. A
row that resumes has it copied to its slot before its step, when the slot's former owner has no step ahead. Copies and
steps run in the order of plans, so a copy whose place is given to another prefix is still there for the rows that were
planned with it.
"""

import itertools
import math
from bisect import insort
from collections import Counter
from typing import override

from jaxserve.request import EngineRequest, FinishReason, Request, RequestStatus
from jaxserve.scheduling.base import Scheduler, SchedulerLimits, SchedulerStats, request_key
from jaxserve.scheduling.block_pool import BlockPool
from jaxserve.scheduling.kept_states import KeptStates
from jaxserve.scheduling.plan import Row, StateCopy, StepPlan
from jaxserve.scheduling.prefix_cache import PrefixCache, domain_hash
from jaxserve.scheduling.snapshot import BlocksSnapshot


class _Step:
    """A plan under construction."""

    __slots__ = ("admitted", "budget", "chunk_rows", "cut_rows", "has_preempted", "passed", "resumed", "single_rows")

    def __init__(self, budget: int):
        self.budget = budget
        self.single_rows: list[Row] = []
        self.chunk_rows: list[Row] = []
        self.admitted: list[Row] = []
        self.cut_rows: list[Row] = []  # where a state is kept
        self.passed: list[tuple[int, bytes, bytes | None]] = []  # slot, prefix, and the one that makes room for it
        self.resumed: list[StateCopy] = []
        self.has_preempted = False


class ContinuousScheduler(Scheduler):
    """Continuous batching with chunked prefill, prefix sharing and preemption by recompute.

    `model_domain` separates the prefixes of different models. Without `enable_prefix_caching` only siblings share their
    prompt.
    """

    def __init__(self, limits: SchedulerLimits, *, enable_prefix_caching: bool, model_domain: bytes):
        super().__init__(limits)
        self._enable_prefix_caching = enable_prefix_caching
        self._model_domain = model_domain
        self._cache = PrefixCache(self._needs)
        self._pool = BlockPool(limits.num_blocks, self._cache, num_groups=len(limits.windows))
        self._states = KeptStates(limits.num_kept_states)
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._group_sizes: Counter[str] = Counter()  # group id -> number of unfinished siblings
        # The first waiting request and the number of blocks it lacked, so that a long waiting prompt is not matched
        # again at every step. An admission clears it, since the admitted request may have computed part of the same
        # prefix.
        self._blocked: tuple[Request, int] | None = None
        self._num_preemptions = 0
        self._num_prefix_queries = 0
        self._num_prefix_hits = 0

    @override
    def add(self, engine_requests: list[EngineRequest]) -> list[Request]:
        requests = super().add(engine_requests)
        self._group_sizes.update(request.asked.group_id for request in requests)
        return requests

    @override
    def schedule(self, max_tokens: int | None = None) -> StepPlan | None:
        limits, running = self._limits, self._running
        block_size = limits.block_size
        budget = min(max_tokens or limits.max_num_batched_tokens, limits.max_num_batched_tokens)
        step = _Step(budget)
        single_rows = step.single_rows
        if self._windowed:
            for request in running:
                if self._has_unseen(request):
                    self._index_blocks(request)
                    self._pool.release(self._drop_unseen(request))
        resting = self._resting() if limits.num_stages > 1 else None
        challenger = self._challenger_priority()
        index = 0
        while index < len(running) and step.budget:
            request = running[index]
            if request.priority > challenger:
                is_admitted = self._admit_challenger(step)
                challenger = self._challenger_priority() if is_admitted else math.inf
                index += is_admitted  # it was inserted at or before `index`, and has its row
                continue
            index += 1
            if resting and request in resting:
                continue
            start = request.num_computed_tokens
            num_tokens = len(request.token_ids) + request.num_pending
            if (
                start % block_size == 0
                or num_tokens - start != 1
                or request.num_pending_drafts
                # With no step in flight, accepted drafts may have stepped over the beginning of a block.
                or (
                    request.takes_drafts
                    and not request.num_pending
                    and start // block_size > request.num_indexed_blocks
                )
            ):
                self._extend(request, step)
            elif num_tokens < request.max_total_tokens:  # else its last token is in flight
                # Inlined `_extend` for the common case: one token into a block that has room.
                request.num_computed_tokens = num_tokens
                request.num_pending += 1
                step.budget -= 1
                single_rows.append(Row(request, request.slot, start, 1, True, 0))
        if not step.has_preempted:
            self._admit_waiting(step)

        rows = single_rows + step.chunk_rows
        if not rows:
            return None
        if limits.drafts.by_rows and not step.chunk_rows:
            rows = self._with_drafts(rows, step.budget)
        # From here on: the rows of this step cannot resume from what it computes.
        keep = self._states.keep
        passed = [
            StateCopy(slot, index)
            for slot, prefix, last in step.passed
            if (index := keep(prefix, instead_of=last)) is not None
        ]
        kept = [
            StateCopy(row.slot, index)
            for row in step.cut_rows
            if (index := keep(self._hash_at(row.request, row.start + row.num_tokens))) is not None
        ]
        num_tokens = budget - step.budget
        num_single_rows, resumed = len(single_rows), step.resumed
        plan = StepPlan(rows, num_single_rows, num_tokens, step.admitted, resumed=resumed, passed=passed, kept=kept)
        self._in_flight.append(plan)
        return plan

    def _resting(self) -> set[Request]:
        """Return the running requests that leave a plan of several stages to others: those whose next token is drawn by
        one of the last plans in flight, for which the first stage would wait, and of those that only need their next
        token all beyond an equal part. Where fewer requests run than there are stages, nobody else would use the time,
        and the oldest of these plans do not count.
        """
        num_stages, running = self._limits.num_stages, self._running
        decoding = [
            request
            for request in running
            if len(request.token_ids) + request.num_pending - request.num_computed_tokens == 1
        ]
        num_parts = min(len(running), num_stages) if len(decoding) == len(running) else num_stages
        recent = itertools.islice(reversed(self._in_flight), max(num_parts - 1, 0))
        resting = {row.request for plan in recent for row in plan.rows if row.samples}
        ready = [request for request in decoding if request not in resting]
        return resting.union(ready[-(-len(running) // num_stages) :])

    @override
    def stats(self) -> SchedulerStats:
        pool, size = self._pool, self._limits.block_size
        num_held_blocks = pool.num_blocks - pool.num_free
        # Only the last blocks of a table can have free positions, and they are never shared.
        num_unused = sum(
            len(table) * size - request.num_computed_tokens
            for request in self._running
            for table in request.block_tables
        )
        held_blocks = dict.fromkeys(self._limits.windows, 0)
        for window, num_held in zip(self._limits.windows, pool.num_held, strict=True):
            held_blocks[window] += num_held
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_preempted=self._num_preempted,
            num_free_blocks=pool.num_free - pool.num_evictable,
            num_cached_blocks=pool.num_evictable,
            kv_cache_usage=num_held_blocks / pool.num_blocks,
            kv_tokens_held=num_held_blocks * size - num_unused,
            kv_positions_allocated=num_held_blocks * size,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._num_prefix_queries,
            prefix_cache_hits=self._num_prefix_hits,
            held_blocks=held_blocks,
        )

    @override
    def _blocks(self) -> BlocksSnapshot:
        return self._pool.snapshot()

    @override
    def reset_prefix_cache(self) -> bool:
        if self._running:
            return False
        self._pool.forget_evictable()
        self._states.clear()
        return True

    def _extend(self, request: Request, step: _Step) -> Row | None:
        """Add and return a row for a running request: all tokens that it has and the budget allows, and their blocks.

        If blocks run out, preempt the running request with the greatest key, repeatedly; if that is this request, it
        gets no row.
        """
        start = request.num_computed_tokens
        num_tokens = len(request.token_ids) + request.num_pending
        if num_tokens >= request.max_total_tokens:  # greater: an accepted draft made a row in flight one too many
            return None  # its last token is in flight
        stops = [stop for stop in request.keep_at if stop > start]
        end = min([num_tokens, start + step.budget, *stops])
        tables = request.block_tables
        num_new_blocks = self._num_new_blocks(request, end)
        while self._pool.num_free < num_new_blocks * len(tables):
            victim = self._preempt_worst(step)
            if victim is request:
                return None
        for group, table in enumerate(tables):
            table += self._pool.allocate(num_new_blocks, group)
        if end - start == 1 and (request.takes_drafts or end in stops):
            self._index_blocks(request)  # but no block that this token fills, as for the common case in `schedule`
            request.num_computed_tokens = end
        else:
            request.num_computed_tokens = end
            self._index_blocks(request)
        samples = end == num_tokens
        request.num_pending += samples
        step.budget -= end - start
        rows = step.single_rows if end - start == 1 else step.chunk_rows
        row = Row(request, request.slot, start, end - start, samples, num_new_blocks)
        rows.append(row)
        if end in stops:
            step.cut_rows.append(row)
        elif (
            start - request.kept_at >= self._limits.min_kept_tokens
            and end > request.num_prompt_tokens
            and not request.num_pending_drafts  # else the state may be behind more tokens
        ):
            self._keep_passed(request, start, step)
        return row

    def _keep_passed(self, request: Request, start: int, step: _Step) -> None:
        """Keep the state that an answer has before this step, if it is behind a full block of known tokens: the next
        turn of a conversation continues there. It replaces the last one of this answer.
        """
        size, last = self._limits.block_size, int(request.kept_at)
        if start % size == 0 and start <= len(request.block_hashes) * size:
            replaced = self._hash_at(request, last) if last > request.num_prompt_tokens else None
            step.passed.append((request.slot, self._hash_at(request, start), replaced))
            request.kept_at = start

    def _num_new_blocks(self, request: Request, end: int) -> int:
        """Return how many ids its block tables lack for `end` tokens and for those of all drafts in flight."""
        most = min(end + request.num_pending_drafts, request.max_total_tokens - 1)
        return max(0, self._num_blocks(max(end, most)) - len(request.block_tables[0]))

    def _with_drafts(self, rows: list[Row], budget: int) -> list[Row]:
        """Return rows of one token each with as many drafts as the number of rows, the budget, and each request's
        limits allow. A draft is worth a free block, but nobody else's.
        """
        if not self._limits.drafts.most(len(rows)):
            return rows
        drafting = [row.request for row in rows if row.samples and row.request.takes_drafts]
        num_drafts = min(self._limits.drafts.num_drafts(drafting, num_rows=len(rows)), budget // len(rows))
        if not num_drafts:
            return rows
        return [self._draft(row, num_drafts) if row.samples and row.request.takes_drafts else row for row in rows]

    def _draft(self, row: Row, num_drafts: int) -> Row:
        request = row.request
        end, pending = row.start + 1, request.num_pending_drafts
        # One token is drawn in any case, and a request never has more uncertain tokens than a step may have at all.
        num_drafts = min(num_drafts, request.max_total_tokens - end - 1, self._needs.max_chunk - 1 - pending)
        if num_drafts <= 0:
            return row
        num_new_blocks = self._num_new_blocks(request, min(end + num_drafts, request.max_total_tokens - 1))
        if num_new_blocks * len(request.block_tables) > self._pool.num_free:
            return row
        for group, table in enumerate(request.block_tables):
            table += self._pool.allocate(num_new_blocks, group)
        request.num_pending_drafts = pending + num_drafts
        return row._replace(num_new_blocks=row.num_new_blocks + num_new_blocks, num_drafts=num_drafts)

    def _preempt_worst(self, step: _Step) -> Request:
        """Preempt the running request with the greatest key. It has no row in this step yet, as rows are added in key
        order.
        """
        victim = self._running.pop()
        self._release(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        insort(self._waiting, victim, key=request_key)
        self._num_preemptions += 1
        self._num_preempted += 1
        step.has_preempted = True
        return victim

    @override
    def _release(self, request: Request) -> None:
        if request.finish_reason != "error":
            self._index_blocks(request)  # also the last full block: a conversation's next turn starts with it
        self._pool.release(request.held_blocks())
        request.clear_blocks()
        request.num_computed_tokens = 0
        request.num_indexed_blocks = 0
        request.keep_at = ()
        self._free_slots.append(request.slot)
        request.slot = -1
        request.proposed = []
        request.num_forced = 0

    @override
    def _finish(self, request: Request, reason: FinishReason) -> None:
        super()._finish(request, reason)
        group_id = request.asked.group_id
        self._group_sizes[group_id] -= 1
        if not self._group_sizes[group_id]:
            del self._group_sizes[group_id]

    # Admission

    def _admit_waiting(self, step: _Step) -> None:
        """Admit waiting requests in key order until slots, blocks or the token budget run out."""
        while step.budget and self._free_slots and self._waiting:
            request = self._waiting[0]
            num_available = self._pool.num_free
            for row in step.cut_rows:
                if row.request.asked.group_id == request.asked.group_id:
                    return  # the rest of their prompt comes with the next step
                num_missing = self._num_new_blocks(row.request, len(row.request.token_ids))
                num_available -= num_missing * len(self._limits.windows)
            if request.status is RequestStatus.PREEMPTED:
                # Blocks are scarce: leave a spare one per running request and KV group, or this one would soon be
                # preempted again.
                num_available -= len(self._running) * len(self._limits.windows)
            hits = self._find_room(request, num_available)
            if hits is None:
                return
            self._admit(request, hits, step)

    def _challenger_priority(self) -> float:
        """Return the priority of the first waiting request; running requests with a greater one yield to it. Infinite
        if none does.
        """
        return self._waiting[0].priority if self._by_priority and self._waiting else math.inf

    def _admit_challenger(self, step: _Step) -> bool:
        """Admit the next waiting request before running ones of strictly worse priority, preempting as many of these as
        needed.

        Preempts nothing and returns false if even all of them would not be enough.
        """
        request = self._waiting[0]
        # If it was preempted in this step, every request still running is better, and no other has been admitted since.
        assert request.num_pending == 0
        worse = [other for other in self._running if other.priority > request.priority]
        released = self._pool.held_only_by([other.held_blocks() for other in worse])
        num_missing = self._num_missing(request, self._match(request), released)
        if num_missing > self._pool.num_free + len(released):
            return False
        # the recorded number may exceed what was just computed, which would cost a better request its blocks
        self._blocked = None
        while True:
            hits = self._find_room(request, self._pool.num_free)
            if hits is not None and self._free_slots:
                self._admit(request, hits, step)
                return True
            self._preempt_worst(step)

    def _find_room(self, request: Request, num_available: int) -> list[list[int]] | None:
        """Return the block tables of the cached prefix that a waiting request would start from, or None if it cannot be
        admitted now because the rest of its tokens needs more than `num_available` blocks.
        """
        if request.num_pending:
            return None  # a token of its own is still in flight, and precedes any new one
        if self._blocked is not None and self._blocked[0] is request and self._blocked[1] > num_available:
            return None
        hits = self._match(request)
        num_missing = self._num_missing(request, hits, set())
        if num_missing > num_available:
            self._blocked = (request, num_missing)
            return None
        return hits

    def _num_missing(self, request: Request, hits: list[list[int]], released: set[int]) -> int:
        """Return the number of blocks that a waiting request takes from the unreferenced ones, with `released` among
        these.

        Blocks shared with a running request are not counted, except in a window, which moves on and leaves them behind.
        """
        num_shared = sum(
            self._pool.is_held(block_id) and block_id not in released
            for table, window in zip(hits, self._limits.windows, strict=True)
            if window is None
            for block_id in table
        )
        start = len(hits[0]) * self._limits.block_size
        return self._needs.peak(len(request.token_ids), start=start) - num_shared

    def _admit(self, request: Request, hits: list[list[int]], step: _Step) -> None:
        """Move the first waiting request to the running ones, with a slot, its cached prefix and a first row."""
        self._blocked = None
        self._waiting.pop(0)
        self._num_preempted -= request.status is RequestStatus.PREEMPTED
        insort(self._running, request, key=request_key)
        request.block_tables = hits
        request.num_indexed_blocks = len(hits[0])
        request.num_computed_tokens = len(hits[0]) * self._limits.block_size
        request.first_blocks = [
            self._needs.first_block(group, request.num_computed_tokens) for group in range(len(hits))
        ]
        self._pool.share(request.held_blocks())
        request.slot = self._free_slots.pop()
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = request.num_computed_tokens
            self._num_prefix_queries += request.num_prompt_tokens
            self._num_prefix_hits += request.num_computed_tokens
        request.status = RequestStatus.RUNNING
        if request.num_computed_tokens and self._limits.has_states:
            index = self._states.use(self._hash_at(request, request.num_computed_tokens))
            step.resumed.append(StateCopy(request.slot, index))
        if self._limits.num_kept_states:
            request.kept_at = max(request.num_computed_tokens, *request.keep_at, 0)
        row = self._extend(request, step)
        assert row is not None, "a request that was admitted has room"
        step.admitted.append(row)

    # Prefix sharing

    def _shares(self, request: Request) -> bool:
        if self._limits.has_states and not self._limits.num_kept_states:
            return False
        return self._enable_prefix_caching or self._group_sizes[request.asked.group_id] > 1

    def _may_hit(self, request: Request) -> bool:
        """Return true if a request may start from cached KV: not if it needs an output of every prompt position."""
        wants_all = request.asked.params.prompt_logprobs is not None or request.asked.pooling not in (None, "last")
        return not wants_all and self._shares(request)

    def _domain(self, request: Request) -> bytes:
        """Return the start of the request's hash chain. Only requests of the same domain may share KV."""
        group_id = "" if self._enable_prefix_caching else request.asked.group_id
        return domain_hash((self._model_domain, request.asked.cache_salt.encode(), group_id.encode()))

    def _match(self, request: Request) -> list[list[int]]:
        """Return block tables of the longest cached prefix of the request's tokens.

        At least one token is left to be computed, so that there are logits. Where layers keep states, the prefix ends
        at a state that was kept, and it is decided which ones the request leaves.
        """
        if not self._may_hit(request):
            return [[] for _ in self._limits.windows]
        num_blocks = (len(request.token_ids) - 1) // self._limits.block_size
        domain, hashes, token_ids = self._domain(request), request.block_hashes, request.token_ids
        self._cache.extend_hashes(hashes, token_ids, num_blocks, domain=domain)
        tables = self._cache.match(hashes, token_ids, num_blocks, domain=domain)
        if not self._limits.has_states:
            return tables
        while num_hits := len(tables[0]):
            num_kept = next((number for number in range(num_hits, 0, -1) if hashes[number - 1] in self._states), 0)
            if num_kept == num_hits:
                break
            tables = self._cache.match(hashes, token_ids, num_kept, domain=domain)
        num_shared = next((number for number in range(num_blocks, 0, -1) if self._cache.has(hashes[number - 1])), 0)
        request.keep_at = self._worth_keeping(num_hits, num_shared, num_blocks)
        return tables

    def _worth_keeping(self, *numbers_of_blocks: int) -> tuple[int, ...]:
        """Return behind how many tokens states are kept: where prefixes part, as far as another request has shared this
        one, and at the end; `numbers_of_blocks` begin with where the request itself starts.
        """
        size, stops = self._limits.block_size, []
        last, *others = (number * size for number in numbers_of_blocks)
        for stop in others:
            if stop - last >= self._limits.min_kept_tokens:
                stops.append(stop)
                last = stop
        return tuple(stops)

    def _hash_at(self, request: Request, num_tokens: int) -> bytes:
        return request.block_hashes[num_tokens // self._limits.block_size - 1]

    def _index_blocks(self, request: Request) -> None:
        """Offer to the cache the blocks that are full of tokens known to the host whose KV has been scheduled."""
        size = self._limits.block_size
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // size
        first = request.num_indexed_blocks
        if num_full <= first or not self._shares(request):
            return
        hashes, token_ids = request.block_hashes, request.token_ids
        domain = self._domain(request) if first == 0 else b""
        self._cache.extend_hashes(hashes, token_ids, num_full, domain=domain)
        for index in range(first, num_full):
            parent = domain if index == 0 else hashes[index - 1]
            tokens = token_ids[index * size : (index + 1) * size]
            block_ids = [table[index] for table in request.block_tables]
            self._cache.insert(block_ids, hashes[index], parent=parent, is_first=index == 0, token_ids=tokens)
        request.num_indexed_blocks = num_full

    @override
    def _distrust(self, request: Request) -> None:
        self._pool.purge(request.block_hashes)
        self._states.clear()

    @override
    def check_integrity(self) -> None:
        super().check_integrity()
        size = self._limits.block_size
        running = self._running
        self._pool.check_integrity([request.held_blocks() for request in running])
        self._cache.check_integrity()
        self._states.check_integrity()
        slots = [*self._free_slots, *(request.slot for request in running)]
        assert sorted(slots) == list(range(self._limits.max_num_seqs)), "a slot is lost"
        assert self._group_sizes == Counter(request.asked.group_id for request in self._requests.values())
        tails = [table[request.num_computed_tokens // size :] for request in running for table in request.block_tables]
        open_blocks = {block_id for tail in tails for block_id in tail}
        assert self._pool.held_only_by(tails) == open_blocks, "a block that will be written to is shared"
        assert sum(map(len, tails)) == len(open_blocks), "a block that will be written to is shared"
        assert open_blocks.isdisjoint(self._cache.block_ids()), "a block that will be written to is cached"
        for request in self._requests.values():
            assert request.num_indexed_blocks * size <= request.num_computed_tokens
            hashes: list[bytes] = []  # recompute the chain
            num_hashes = len(request.block_hashes)
            assert num_hashes * size <= len(request.token_ids), "a hash of unknown tokens"
            self._cache.extend_hashes(hashes, request.token_ids, num_hashes, domain=self._domain(request))
            assert hashes == request.block_hashes, "a wrong hash chain"
