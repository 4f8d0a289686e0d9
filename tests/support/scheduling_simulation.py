"""A scheduler with a simulated device: traffic goes through both, and every read and write of KV is checked.

KV at one position depends on the domain and on every token up to there, and belongs to one KV group. The device
therefore stores a group and a history (a node in a tree of token prefixes) at each (block, offset), executes plans in
order as soon as they are made, as a real one would in its own time, and asserts that each row finds exactly its own
history in its block tables, as far back as each group attends. Tokens are a function of the history, so each request's
output has to equal a naive generation, however its blocks were shared, chunked, given back or preempted.
"""

import hashlib
import itertools
import zlib
from collections import deque

from jaxserve.request import NO_BLOCK, EngineRequest, Request, RequestStatus
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.continuous import ContinuousScheduler
from jaxserve.scheduling.drafting import DraftPolicy
from jaxserve.scheduling.plan import Row, StepPlan
from jaxserve.scheduling.prefix_cache import domain_hash, pack_tokens
from jaxserve.scheduling.scheduler import RowOutcome, Scheduler, SchedulerLimits, make_scheduler

VOCAB = 7
STOP = 0


def make_request(
    name, prompt, max_tokens=8, *, group=None, priority=0, salt="", prompt_logprobs=None, frequency_penalty=0.0
):
    return EngineRequest(
        request_id=name,
        group_id=group or name,
        prompt_token_ids=list(prompt),
        params=SamplingParams(prompt_logprobs=prompt_logprobs, frequency_penalty=frequency_penalty),
        max_tokens=max_tokens,
        stop_token_ids=frozenset({STOP}),
        seed=zlib.crc32(name.encode()) % 2,  # so that some continue a prompt in the same way
        priority=priority,
        cache_salt=salt,
    )


def make_limits(**changes):
    """Return small limits with these changes; `num_kept_states` None, which is the default: layers keep no states."""
    defaults = {"num_blocks": 16, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    if (num_kept := changes.pop("num_kept_states", None)) is not None:
        changes |= {"has_states": True, "num_kept_states": num_kept}
    return SchedulerLimits(**(defaults | changes | {"drafts": DraftPolicy(changes.get("drafts", ()))}))


def next_token(tokens: list[int], seed: int) -> int:
    """Return the simulated model's next token; one time in forty that is a stop token."""
    draw = (zlib.crc32(bytes(tokens), seed) >> 8) % 40
    return STOP if draw == 0 else 1 + draw % VOCAB


def naive_generation(request: EngineRequest) -> tuple[list[int], str]:
    tokens = list(request.prompt_token_ids)
    for _ in range(request.max_tokens):
        tokens.append(next_token(tokens, request.seed))
        if tokens[-1] in request.stop_token_ids:
            return tokens, "stop"
    return tokens, "length"


def shape(plan):
    """Return a plan as one (id, start, num_tokens, samples) per row."""
    return [(row.request.request_id, row.start, row.num_tokens, row.samples) for row in plan.rows]


def prompt(length, first=1):
    return [(first + i) % 7 + 1 for i in range(length)]


def never_stops(name, length, max_tokens, **options):
    """Return a request whose naive generation runs to its limit. Names with the same first letter have the same prompt,
    except for its last token.
    """
    stem = [ord(name[0]), *prompt(length)]
    for last in range(1, 200):
        request = make_request(name, [*stem[: length - 1], last], max_tokens, **options)
        if naive_generation(request)[1] == "length":
            return request
    raise AssertionError("no such prompt")


class Histories:
    """The tree of token prefixes: a node is (parent node, token), a root is a domain."""

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._ids: dict[tuple, int] = {}
        self.links: list[tuple] = []
        self._hashes: dict[int, bytes] = {}

    def node(self, parent: int | str, token: object) -> int:
        link = (parent, token)
        if link not in self._ids:
            self._ids[link] = len(self.links)
            self.links.append(link)
        return self._ids[link]

    def root(self, *domain: str) -> int:
        return self.node("root", domain)

    def path(self, node: int) -> tuple[tuple, list[int]]:
        tokens = []
        while self.links[node][0] != "root":
            node, token = self.links[node]
            tokens.append(token)
        return self.links[node][1], tokens[::-1]

    def block_hash(self, node: int) -> bytes:
        """Return the chained hash that the cache should have for this prefix; deliberately written a second time."""
        if node not in self._hashes:
            domain, tokens = self.path(node)
            assert len(tokens) % self._block_size == 0, "a cached block ends inside a block"
            chain = domain_hash(part.encode() for part in domain)
            for start in range(0, len(tokens), self._block_size):
                chain = hashlib.sha256(chain + pack_tokens(tokens[start : start + self._block_size])).digest()
            self._hashes[node] = chain
        return self._hashes[node]


class Device:
    """Slots and KV. `execute` is a step; the tokens it returns reach the scheduler later."""

    def __init__(self, limits: SchedulerLimits, *, share_all: bool):
        self.block_size = limits.block_size
        self.num_blocks = limits.num_blocks
        self.windows = limits.windows
        self.share_all = share_all
        self.histories = Histories(limits.block_size)
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}  # (block, offset) -> (group, node)
        self.states: dict[int, tuple[int, bool]] = {}  # slot -> (node, poisoned)
        self.kept_states: dict[int, tuple[int, bool]] = {}
        self.has_states = limits.has_states
        self.poisoned: set[tuple[int, int]] = set()
        self.owners: dict[int, Request] = {}
        self.tables: dict[int, list[list[int]]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.nodes: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        """The positions before which the rows of the step that runs compute, those of drafts included."""
        self.num_accepted = 0
        self.num_rejected = 0
        self.num_resumed = self.num_passed = 0
        self.num_shared_decodes = 0
        """Steps of one token per row in which two rows read the same position."""
        self.num_cut_decodes = 0
        """Steps of one token a row in which the budget left a chunk no more than that."""

    def execute(self, plan: StepPlan, poisoned_requests: set[Request]) -> tuple[list[list[int]], list[bool]]:
        admitted = {row.slot for row in plan.admitted}
        for request, _, start, *_ in plan.admitted:
            assert request.num_computed_tokens > 0, "admitted without a row"
            self.computed[request.slot] = start
            self.owners[request.slot] = request
            self.tables[request.slot] = [list(table) for table in request.block_tables]
            self.tokens[request.slot] = list(request.token_ids)
            self.nodes[request.slot] = []
        for slot, index in plan.resumed:
            assert slot in admitted, "a state in a running request's slot"
            self.states[slot] = self.kept_states[index]
            self.num_resumed += 1
        for slot, index in plan.passed:
            assert slot not in admitted, "a request that has just begun has passed nothing"
            self.kept_states[index] = self.states[slot]
            self.num_passed += 1
        for row in plan.rows:
            assert self.owners[row.slot] is row.request, "a row in somebody else's slot"
            for mine, table in zip(self.tables[row.slot], row.request.block_tables, strict=True):
                if row.slot not in admitted and row.num_new_blocks:
                    mine += table[-row.num_new_blocks :]
                # A block that was given back stays in the device's table.
                assert len(mine) == len(table), "the device's block table is stale"
                assert all(b in (a, NO_BLOCK) for a, b in zip(mine, table, strict=True)), "... is stale"

        outcomes = {row.slot: self._verify(row) for row in plan.rows}
        written: set[tuple[int, int]] = set()
        for row in plan.rows:
            nodes = self.nodes[row.slot]
            for group, position in self._writes(row):
                place = self._place(row, group, position)
                assert place not in written, "two rows write to one place"
                written.add(place)
                self.memory[place] = group, nodes[position]
        self.poisoned -= written
        for row in plan.rows:
            nodes = self.nodes[row.slot]
            for group, position in self._reads(row):
                held = self.memory.get(self._place(row, group, position))
                assert held == (group, nodes[position]), "a row reads somebody else's KV"
        if plan.num_decode_rows == len(plan.rows) and not any(row.num_drafts for row in plan.rows):
            self._check_decode_only(plan)
        if self.has_states:
            self._advance_states(plan, outcomes)
        failed = self._spread_poison(plan, poisoned_requests)
        if self.has_states:
            self.states |= {row.slot: (self.states[row.slot][0], True) for row in plan.rows if row.request in failed}
        for slot, index in plan.kept:
            self.kept_states[index] = self.states[slot]

        for row in plan.rows:
            new = outcomes[row.slot]
            self.tokens[row.slot] += new
            if new or not row.samples:
                self.computed[row.slot] += row.num_tokens + max(0, len(new) - 1)
            del self.nodes[row.slot][self.computed[row.slot] :]
        return [outcomes[row.slot] for row in plan.rows], [row.request not in failed for row in plan.rows]

    def _advance_states(self, plan: StepPlan, outcomes: dict[int, list[int]]) -> None:
        """Check that each row starts from the state of its own history, and advance it by what is not rejected."""
        for row in plan.rows:
            start, nodes = self.computed[row.slot], self.nodes[row.slot]
            if start:
                assert self.states[row.slot][0] == nodes[start - 1], "a row starts from somebody else's state"
            is_poisoned = start > 0 and self.states[row.slot][1]
            num_rejected = self.ends[row.slot] - start - row.num_tokens - max(0, len(outcomes[row.slot]) - 1)
            self.states[row.slot] = nodes[self.ends[row.slot] - max(0, num_rejected) - 1], is_poisoned

    def _verify(self, row: Row) -> list[int]:
        """Return the tokens that a row draws: one, and one for each of its drafts that is right. Drafts are made up
        here, some of them right; `nodes` then has those of all positions that the row computes.
        """
        request, tokens, nodes = row.request.asked, self.tokens[row.slot], self.nodes[row.slot]
        start = self.computed[row.slot]
        assert row.start <= start <= row.start + row.request.num_pending_drafts
        assert row.start == start or row.request.takes_drafts
        limit = row.request.max_total_tokens
        input_tokens = tokens[start : start + row.num_tokens]
        is_over = len(tokens) == limit
        new: list[int] = []
        if is_over:
            input_tokens = []
        else:
            assert len(input_tokens) == row.num_tokens, "a row of tokens that the device does not know"
            assert row.samples == (start + row.num_tokens == len(tokens))
            if row.samples:
                draw = zlib.crc32(bytes(tokens)) % 1000
                num_drafts = min(row.num_drafts, draw % 7, limit - 1 - len(tokens))
                num_right = draw // 7 % (num_drafts + 1)
                for index in range(num_drafts + 1):
                    new.append(next_token(tokens + new, request.seed))
                    if index == num_right:
                        break
                wrong = VOCAB + 1
                input_tokens = input_tokens + (new[:num_right] + [wrong] * num_drafts)[:num_drafts]
                self.num_accepted += num_right
                self.num_rejected += num_drafts - num_right
        group = "" if self.share_all else request.group_id
        known = tokens[:start] + input_tokens
        for position in range(len(nodes), len(known)):
            parent = nodes[-1] if nodes else self.histories.root("model", request.cache_salt, group)
            nodes.append(self.histories.node(parent, known[position]))
        self.ends[row.slot] = start + len(input_tokens)
        return new

    def _check_decode_only(self, plan: StepPlan) -> None:
        """Check what Batch.is_decode_only promises, for blocks of more than one token."""
        assert all(row.num_tokens == 1 for row in plan.rows)
        writes = [{self._place(row, *place) for place in self._writes(row)} for row in plan.rows]
        reads = [{self._place(row, *place) for place in self._reads(row)} for row in plan.rows]
        if self.block_size > 1:
            for own, attended in zip(writes, reads, strict=True):
                others = set().union(*writes) - own
                assert others.isdisjoint(attended), "a row attends to what another writes in a step of one token a row"
        self.num_shared_decodes += sum(map(len, reads)) > len(set().union(*reads))
        self.num_cut_decodes += not all(row.samples for row in plan.rows)

    def _spread_poison(self, plan: StepPlan, requests: set[Request]) -> set[Request]:
        failed = {row.request for row in plan.rows if row.request in requests}
        while True:
            for row in plan.rows:
                if row.request in failed:
                    self.poisoned.update(self._place(row, *place) for place in self._writes(row))
            reached = {
                row.request
                for row in plan.rows
                if any(self._place(row, *place) in self.poisoned for place in self._reads(row))
                or self.states.get(row.slot, (0, False))[1]
            }
            if reached <= failed:
                return failed
            failed |= reached

    def _writes(self, row: Row) -> list[tuple[int, int]]:
        """Return the (group, position) pairs that a row computes."""
        positions = range(self.computed[row.slot], self.ends[row.slot])
        return [(group, position) for group in range(len(self.windows)) for position in positions]

    def _reads(self, row: Row) -> list[tuple[int, int]]:
        """Return the (group, position) pairs that the tokens of a row attend to."""
        start, end = self.computed[row.slot], self.ends[row.slot]
        if start == end:
            return []
        firsts = [0 if window is None else max(0, start - window + 1) for window in self.windows]
        return [(group, position) for group, first in enumerate(firsts) for position in range(first, end)]

    def _place(self, row: Row, group: int, position: int) -> tuple[int, int]:
        block_id = self.tables[row.slot][group][position // self.block_size]
        assert 0 <= block_id < self.num_blocks
        return block_id, position % self.block_size


class Simulation:
    """Scheduler, device and the results in flight between them. After each operation everything is checked."""

    def __init__(self, limits: SchedulerLimits, *, kind="continuous", enable_prefix_caching=True):
        self.limits = limits
        self.scheduler: Scheduler = make_scheduler(
            kind, limits, enable_prefix_caching=enable_prefix_caching, model_domain=b"model"
        )
        self.device = Device(limits, share_all=enable_prefix_caching)
        self.in_flight: deque[tuple[StepPlan, list[list[int]], list[bool]]] = deque()
        self.requests: list[Request] = []
        self.poisoned_requests: set[Request] = set()
        self.num_operations = 0

    @property
    def unfinished(self) -> list[Request]:
        return [request for request in self.requests if not request.is_finished]

    def add(self, *engine_requests: EngineRequest) -> list[Request]:
        requests = self.scheduler.add(list(engine_requests))
        self.requests += requests
        self.check()
        return requests

    def schedule(self) -> StepPlan | None:
        resumable = {request for request in self.unfinished if request.status is not RequestStatus.RUNNING}
        plan = self.scheduler.schedule()
        if plan is None:
            assert self.in_flight or not self.scheduler.has_work, "nothing in flight, work to do, and no plan"
        else:
            if isinstance(self.scheduler, ContinuousScheduler):
                assert {row.request for row in plan.admitted} <= resumable, (
                    "admitted although it was running when the step began"
                )
            tokens, ok = self.device.execute(plan, self.poisoned_requests)
            self.in_flight.append((plan, tokens, ok))
        self.check()
        return plan

    def update(self) -> list[RowOutcome]:
        plan, tokens, ok = self.in_flight.popleft()
        were_finished = [row.request.is_finished for row in plan.rows]
        outcomes = self.scheduler.update(plan, tokens, ok)
        for row, new, row_ok, was_finished, outcome in zip(plan.rows, tokens, ok, were_finished, outcomes, strict=True):
            self._check_outcome(row, new, row_ok, was_finished, outcome)
        self.check()
        return outcomes

    def step(self, num_in_flight: int) -> StepPlan | None:
        """Plan and start one step, then finish steps until `num_in_flight` are left, as the engine does."""
        plan = self.schedule()
        while self.in_flight and (plan is None or len(self.in_flight) > num_in_flight):
            self.update()
        return plan

    def abort(self, *requests: Request) -> None:
        unfinished = [request for request in requests if not request.is_finished]
        assert self.scheduler.abort([request.request_id for request in requests]) == unfinished
        assert all(request.finish_reason == "abort" for request in unfinished)
        self.check()

    def drain(self, num_in_flight: int = 0) -> None:
        """Run until all requests have finished, within a bound on the number of steps."""
        bound = 100 + 20 * sum(request.max_total_tokens for request in self.unfinished)
        for _ in range(bound):
            if not self.scheduler.has_work and not self.in_flight:
                break
            self.step(num_in_flight)
        assert not self.unfinished, "somebody waits for ever"
        stats = self.scheduler.stats()
        assert stats.num_running == stats.num_waiting == stats.kv_positions_allocated == stats.kv_tokens_held == 0

    def check(self) -> None:
        self.num_operations += 1
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert 0 <= stats.kv_tokens_held <= stats.kv_positions_allocated
        assert sum(stats.held_blocks.values()) * self.limits.block_size == stats.kv_positions_allocated
        if isinstance(self.scheduler, ContinuousScheduler):
            self._check_cache(self.scheduler)

    def _check_cache(self, scheduler: ContinuousScheduler) -> None:
        """Check that every cached block holds, on the device, exactly the KV of the prefix that its hash stands for."""
        device, histories = self.device, self.device.histories
        for block_hash, entry in scheduler._cache._entries.items():
            for group, block_id in enumerate(entry.block_ids):
                if block_id == NO_BLOCK:
                    continue
                held = [device.memory[block_id, offset] for offset in range(device.block_size)]
                assert {of for of, _ in held} == {group}, "a block of another group"
                nodes = [node for _, node in held]
                assert all(histories.links[node][0] == before for before, node in itertools.pairwise(nodes))
                assert histories.block_hash(nodes[-1]) == block_hash, "a stale write into a cached block"
        kept = [(of, device.kept_states[index]) for of, index in scheduler._states._indices.items()]
        assert all(histories.block_hash(node) == of for of, (node, _) in kept), "the state of another prefix"
        if not self.in_flight:
            assert not any(is_poisoned for _, (_, is_poisoned) in kept), "a poisoned state is kept"
            cached = set(scheduler._cache.block_ids())
            assert cached.isdisjoint(block_id for block_id, _ in device.poisoned), "poison in the cache"

    def _check_outcome(self, row: Row, new: list[int], row_ok: bool, was_finished: bool, outcome: RowOutcome) -> None:
        request = row.request
        if was_finished:
            assert outcome is RowOutcome.DROPPED
            return
        if not row_ok:
            assert outcome is RowOutcome.FAILED
            assert request.finish_reason == "error"
            return
        tokens, reason = naive_generation(request.asked)
        num_known = len(request.token_ids)
        assert request.token_ids == tokens[:num_known], "not the tokens of a naive generation"
        if not row.samples:
            assert outcome is RowOutcome.CHUNK
        elif num_known == len(tokens):
            assert outcome is RowOutcome.LAST_TOKEN
            assert request.finish_reason == reason
        else:
            assert outcome is RowOutcome.TOKEN
        if row.samples:
            assert request.token_ids[-len(new) :] == new
