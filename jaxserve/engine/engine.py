"""Engine: joins scheduler and runner. `step` plans step N + 1, starts it, then handles the tokens of step N."""

import bisect
import contextlib
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable

import jax
import numpy as np

from jaxserve.engine.bandwidth import BandwidthMeter
from jaxserve.engine.client import EngineStats, window_name
from jaxserve.errors import InvalidRequest, JaxserveError, RequestFailed
from jaxserve.execution.programs.readiness import Needs
from jaxserve.execution.runner import HostLogprobs, PendingStep, Runner
from jaxserve.execution.slots import Masks
from jaxserve.metrics import PREEMPTIONS, STEP_TIMES, STEP_TOKENS
from jaxserve.request import EngineOutput, EngineRequest, Refusal, Request, TokenLogprobs
from jaxserve.scheduling.plan import Row, StepPlan
from jaxserve.scheduling.scheduler import RowOutcome, Scheduler
from jaxserve.structured.matchers import Matchers, refusal

NO_PROGRAM = "a program that this request needs does not compile: the log of the engine says why"


class Engine:
    """One scheduler, one runner, and at most one step in flight while the host works, or as many as there are stages.

    Not thread-safe: one thread owns it (`local.LocalEngineClient`).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        overlap: bool,
        matchers: Matchers | None = None,
        bandwidth: BandwidthMeter | None = None,
    ):
        """Join a scheduler and a runner.

        `matchers` follow the grammars of constrained requests, which are refused without them. Without a `bandwidth`
        meter the reported bandwidth utilization is 0.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.on_plan: Callable[[StepPlan], object] | None = None
        """Called with the plan of each step once it is started, by the thread that owns the engine."""
        self._matchers = matchers
        self._max_in_flight = runner.num_stages if overlap else 0
        self._in_flight: deque[PendingStep] = deque()
        self._began = 0.0
        """When the device began with the oldest step in flight: it was started, or the one before had come back."""
        self._deferred: list[list[EngineRequest]] = []
        """Groups of requests whose programs are not compiled yet."""
        self._needs = Needs()
        """What requests need of programs since the scheduler was empty, while not all programs are there."""
        self._seen_version = 0
        self._num_prompt_logprobs: dict[str, int] = {}
        self._num_corrupted = 0
        self._num_steps = 0
        self._num_step_tokens = 0
        self._step_time_counts = [0] * (len(STEP_TIMES) + 1)
        self._step_tokens_counts = [0] * (len(STEP_TOKENS) + 1)
        self._preemption_counts = [0] * (len(PREEMPTIONS) + 1)
        self._num_ended_preemptions = 0
        self.num_output_tokens = 0
        self._num_drafts = 0
        self._num_draft_tokens = 0
        drafting = runner.model.drafting
        self._num_accepted_per_position = [0] * (0 if drafting is None else drafting.proposer.num_drafts)
        self._bandwidth = bandwidth or BandwidthMeter(weight_bytes=0, bytes_per_position=0, peak=None)
        self.seconds = {"schedule": 0.0, "wait": 0.0, "masks": 0.0, "update": 0.0, "total": 0.0}

    @property
    def has_work(self) -> bool:
        """True if `step` has anything to do."""
        return (
            bool(self._in_flight)
            or self.scheduler.has_work
            or self._num_compiling > 0
            or self.runner.can_advance_warm_up
            or self._has_new_programs
        )

    @property
    def has_requests(self) -> bool:
        """True while a request is unfinished."""
        return self.scheduler.has_work or self._num_compiling > 0 or bool(self._deferred)

    @property
    def _has_new_programs(self) -> bool:
        """True if requests that wait for programs may have them now."""
        readiness = self.runner.readiness
        return bool(self._deferred) and (readiness is None or readiness.version != self._seen_version)

    @property
    def num_waiting(self) -> int:
        """Requests that have yet to run, or to run again. From any thread."""
        return self.scheduler.num_waiting + self._num_compiling + self._num_deferred

    @property
    def _num_deferred(self) -> int:
        return sum(map(len, self._deferred))

    @property
    def _num_compiling(self) -> int:
        return 0 if self._matchers is None else self._matchers.num_compiling

    def add(self, requests: list[EngineRequest]) -> None:
        """Queue requests, all or none; those with a grammar wait apart until it is compiled, and those that need a
        program that is not compiled yet, for that.

        Raises what `Scheduler.add` raises.
        """
        constrained = [request for request in requests if request.grammar]
        if constrained and self._matchers is None:
            raise InvalidRequest("this engine follows no grammars", param="structured_outputs")
        self._admit([request for request in requests if not request.grammar])
        if self._matchers is not None:
            for _, group in itertools.groupby(constrained, lambda request: request.group_id):
                self._matchers.start(list(group))

    def abort(self, request_ids: list[str]) -> None:
        """Drop requests; their blocks are free for the next step."""
        for request in self.scheduler.abort(request_ids):
            self._count_end(request)
        if self._deferred:
            aborted = set(request_ids)
            left = ([each for each in group if each.request_id not in aborted] for group in self._deferred)
            self._deferred = [group for group in left if group]
        for request_id in request_ids:
            self._num_prompt_logprobs.pop(request_id, None)
        if self._matchers is not None:
            self._matchers.forget(request_ids)

    def step(self) -> list[EngineOutput]:
        """Start the next step, then return the outputs of the one before.

        This also holds for requests with a grammar: only their draw depends on their token of the step before, and the
        mask that it determines is computed while the device runs the layers.
        """
        self.runner.advance_warm_up()
        outputs = self._add_compiled() if self._num_compiling else []
        if self._has_new_programs:
            outputs += self._add_deferred()
        start = time.perf_counter()
        readiness = self.runner.readiness
        plan = self.scheduler.schedule(None if readiness is None else readiness.max_tokens(self._needs))
        self.seconds["schedule"] += time.perf_counter() - start
        if plan is not None:
            for row in plan.admitted:
                request = row.request
                if request.queue_seconds is None:
                    request.queue_seconds = time.monotonic() - request.asked.arrival_time
            failed: dict[Request, str] = {}
            constrained = [row for row in plan.rows if row.samples and row.request.asked.grammar]
            masks = functools.partial(self._masks, constrained, failed) if constrained else None
            if not self._in_flight:
                self._began = time.perf_counter()
            self._in_flight.append(self.runner.dispatch(plan, masks=masks))
            outputs += [self._refuse(request, reason) for request, reason in failed.items()]
            self._num_steps += 1
            self._num_step_tokens += plan.num_tokens
            if (on_plan := self.on_plan) is not None:  # another thread may set it to None at any time
                on_plan(plan)
        if self._in_flight and (plan is None or len(self._in_flight) > self._max_in_flight):
            outputs += self._finish(self._in_flight.popleft())
        spent = time.perf_counter() - start
        self.seconds["total"] += spent
        if plan is not None:
            self._step_time_counts[bisect.bisect_left(STEP_TIMES, spent)] += 1
            self._step_tokens_counts[bisect.bisect_left(STEP_TOKENS, plan.num_tokens)] += 1
        return outputs

    def close(self) -> None:
        """Free the device, once its steps and copies to the host are done: XLA aborts a process that ends before."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the error of a step whose requests are gone
            for pending in self._in_flight:
                pending.token_ids()
        self.runner.close()
        if self._matchers is not None:
            self._matchers.close()

    def stats(self) -> EngineStats:
        """Counters and gauges as of now."""
        scheduler, loads = self.scheduler.stats(), self.runner.expert_loads(wait=not self._in_flight)
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + self._num_compiling + self._num_deferred,
            num_waiting_new=scheduler.num_waiting - scheduler.num_preempted,
            num_waiting_preempted=scheduler.num_preempted,
            num_waiting_deferred=self._num_compiling + self._num_deferred,
            num_free_blocks=scheduler.num_free_blocks,
            num_cached_blocks=scheduler.num_cached_blocks,
            kv_cache_usage=scheduler.kv_cache_usage,
            kv_tokens_held=scheduler.kv_tokens_held,
            kv_positions_allocated=scheduler.kv_positions_allocated,
            kv_bytes_held={
                window_name(window): count * self.runner.bytes_per_block
                for window, count in scheduler.held_blocks.items()
            },
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            num_compiles=self.runner.num_compiles,
            num_recompiles_after_warmup=self.runner.num_recompiles_after_warmup,
            num_corrupted_requests=self._num_corrupted,
            num_steps=self._num_steps,
            step_time_seconds=self.seconds["total"],
            wait_seconds=self.seconds["wait"],
            num_step_tokens=self._num_step_tokens,
            step_time_counts=tuple(self._step_time_counts),
            step_tokens_counts=tuple(self._step_tokens_counts),
            preemption_counts=tuple(self._preemption_counts),
            num_ended_preemptions=self._num_ended_preemptions,
            hbm_bandwidth_utilization=self._bandwidth.ratio(
                num_steps=self._num_steps, seconds=self.seconds["total"], num_positions=scheduler.kv_tokens_held
            ),
            spec_decode_num_drafts=self._num_drafts,
            spec_decode_num_draft_tokens=self._num_draft_tokens,
            spec_decode_num_accepted_tokens=sum(self._num_accepted_per_position),
            spec_decode_num_accepted_tokens_per_pos=tuple(self._num_accepted_per_position),
            expert_tokens=() if loads is None else tuple(loads.sum(axis=0).tolist()),
        )

    def _add_compiled(self) -> list[EngineOutput]:
        """Queue the requests whose grammar is there by now; returns the ends of those whose grammar cannot be had."""
        assert self._matchers is not None
        is_idle = not self._in_flight and not self.scheduler.has_work
        compiled, refused = self._matchers.take_compiled(wait=is_idle)
        for group in compiled:
            self._admit(group)
        return [_refused(request.request_id, error) for group, error in refused for request in group]

    def _admit(self, requests: list[EngineRequest]) -> None:
        """Queue requests, except for those that need programs that are not there. Raises as `Scheduler.add` does."""
        if self.runner.readiness is None:
            self.scheduler.add(requests)
            return
        if not self.scheduler.has_work:
            self._needs = Needs()
        groups = [list(group) for _, group in itertools.groupby(requests, lambda request: request.group_id)]
        self.scheduler.add([request for group in groups if self._take_needs(group) for request in group])

    def _take_needs(self, group: list[EngineRequest]) -> bool:
        """Return true if there are programs for this group and all that runs. Otherwise it is deferred."""
        readiness = self.runner.readiness
        needs = self._needs.union(Needs.of(group))
        if readiness is None or readiness.max_tokens(needs):
            self._needs = needs
            return True
        self._deferred.append(group)
        self._seen_version = -1
        self.runner.want(readiness.missing(needs))
        return False

    def _add_deferred(self) -> list[EngineOutput]:
        """Queue the requests whose programs are there by now; returns the ends of those that will have none."""
        readiness = self.runner.readiness
        version = -1 if readiness is None else readiness.version
        groups, self._deferred = self._deferred, []
        refused = []
        if readiness is not None:
            refused = [group for group in groups if readiness.is_hopeless(self._needs.union(Needs.of(group)))]
        for group in groups:
            if group not in refused:
                self._admit(group)
        self._seen_version = version
        ids = [request.request_id for group in refused for request in group]
        if self._matchers is not None:
            self._matchers.forget(ids)
        return [_refused(request_id, RequestFailed(NO_PROGRAM)) for request_id in ids]

    def _masks(self, rows: list[Row], failed: dict[Request, str], num_columns: int) -> Masks:
        """Return the masks of these rows, which may have drafts in all but the first of `num_columns`, for the step
        that has just been started.

        Waits for their tokens of the steps before, and records in `failed` the requests that cannot continue, with the
        reason.
        """
        assert self._matchers is not None
        start = time.perf_counter()
        requests = [row.request for row in rows]
        wanted = set(requests)
        drawn: dict[str, list[int]] = {}
        proposed = {request: request.proposed for request in requests}
        self.runner.num_waits += 1
        for step in self._in_flight:
            indices = [index for index, row in enumerate(step.plan.rows) if row.samples and row.request in wanted]
            if indices:
                token_ids, is_corrupted, drafted = step.token_ids(), step.is_corrupted(), step.drafted()
                for index in indices:
                    request = step.plan.rows[index].request
                    proposed[request] = [] if drafted is None else drafted[index].proposed
                    if not is_corrupted[index]:
                        drawn.setdefault(request.request_id, []).extend(token_ids[index])
        self.runner.num_waits += 1
        waited = time.perf_counter()
        drafts = [proposed[row.request][: min(row.num_drafts, num_columns - 1)] for row in rows]
        words, num_masked, reasons = self._matchers.masks(requests, drawn, drafts, num_columns=num_columns)
        failed.update(reasons)
        numbers = self.runner.model.no_drafts(len(rows))
        for index, request in enumerate(requests if numbers.shape[1] else []):
            forced = [] if request in failed else self._matchers.forced(request)[: numbers.shape[1] - 2]
            request.num_forced = max(0, len(forced) - 1)  # the first one is drawn by this step
            numbers[index, :2] = num_masked[index], len(forced)
            numbers[index, 2 : 2 + len(forced)] = forced
        self.seconds["wait"] += waited - start
        self.seconds["masks"] += time.perf_counter() - waited
        return Masks(np.array([row.slot for row in rows], np.int32), words, numbers)

    def _refuse(self, request: Request, reason: str) -> EngineOutput:
        """End a request whose grammar cannot be followed any further.

        Its blocks stay in the prefix cache: they hold the KV of its tokens, whichever were allowed. If its numbers were
        not finite, `Scheduler.update` drops them.
        """
        self.abort([request.request_id])
        return _refused(request.request_id, refusal(reason))

    def _count_end(self, request: Request) -> None:
        self._preemption_counts[bisect.bisect_left(PREEMPTIONS, request.num_preemptions)] += 1
        self._num_ended_preemptions += request.num_preemptions

    def _forget(self, request: Request) -> None:
        """Drop the engine's state of a request that has ended."""
        self._num_prompt_logprobs.pop(request.request_id, None)
        if self._matchers is not None and request.asked.grammar:
            self._matchers.forget((request.request_id,))

    def _finish(self, pending: PendingStep) -> list[EngineOutput]:
        start = time.perf_counter()
        self.runner.num_waits += 1
        token_ids, corrupted = pending.token_ids(), pending.is_corrupted()
        waited = time.perf_counter()
        self.seconds["wait"] += waited - start
        taken, self._began = waited - self._began, waited
        outputs = self._update(pending, token_ids, corrupted, seconds=taken)
        self.runner.num_waits += 1
        self.num_output_tokens += sum(len(output.new_token_ids) for output in outputs)
        self.seconds["update"] += time.perf_counter() - waited
        return outputs

    def _update(
        self, pending: PendingStep, token_ids: list[list[int]], is_corrupted: list[bool], *, seconds: float
    ) -> list[EngineOutput]:
        """Return what a step adds to its requests, once the scheduler has their tokens."""
        plan, drafted = pending.plan, pending.drafted()
        ok = [not corrupted for corrupted in is_corrupted] if any(is_corrupted) else None
        outcomes = self.scheduler.update(plan, token_ids, ok, drafted, seconds=seconds)
        logprobs, prompt_logprobs, embeddings = pending.logprobs(), pending.prompt_logprobs(), pending.embeddings()
        outputs = []
        first_token = 0  # of the row, among the tokens of the step
        for index, (row, outcome, drawn) in enumerate(zip(plan.rows, outcomes, token_ids, strict=True)):
            request = row.request
            if outcome is RowOutcome.FAILED:
                self._num_corrupted += 1
                outputs.append(_corrupted(request))
            elif request.asked.pooling is not None:
                if outcome is RowOutcome.LAST_TOKEN and embeddings is not None:
                    outputs.append(_embedded(request, embeddings[index]))
            elif outcome is not RowOutcome.DROPPED:
                new_token_ids = [] if outcome is RowOutcome.CHUNK else drawn
                of_prompt = None
                if prompt_logprobs is not None:
                    of_prompt = self._take_prompt_logprobs(row, prompt_logprobs, first_token)
                if new_token_ids or of_prompt:
                    first = index * pending.num_columns
                    of_tokens = None if logprobs is None else _logprobs(request, new_token_ids, logprobs, first)
                    num_drafts = 0 if drafted is None else drafted[index].num_verified
                    self._count_drafts(num_drafts, new_token_ids)
                    outputs.append(_continued(request, new_token_ids, of_tokens, of_prompt, num_drafts))
            if outcome in (RowOutcome.FAILED, RowOutcome.LAST_TOKEN):
                self._count_end(request)
                self._forget(request)
            first_token += row.num_tokens
        return outputs

    def _count_drafts(self, num_verified: int, new_token_ids: list[int]) -> None:
        if num_verified:
            self._num_drafts += 1
            self._num_draft_tokens += num_verified
            for position in range(len(new_token_ids) - 1):
                self._num_accepted_per_position[position] += 1

    def _take_prompt_logprobs(self, row: Row, logprobs: HostLogprobs, first_token: int) -> list[TokenLogprobs] | None:
        """Return the logprobs of the prompt tokens that the row predicts, except those returned before a preemption.
        None if there are none, or nobody asked for them.
        """
        request = row.request
        num_top = request.asked.params.prompt_logprobs
        if num_top is None:
            return None
        done = self._num_prompt_logprobs.get(request.request_id, 0)
        end = min(row.start + row.num_tokens, request.num_prompt_tokens - 1)
        positions = range(max(row.start, done), end)
        self._num_prompt_logprobs[request.request_id] = max(done, end)
        found = [
            logprobs.entry(first_token + position - row.start, request.token_ids[position + 1], num_top)
            for position in positions
        ]
        return found or None


def _continued(
    request: Request,
    new_token_ids: list[int],
    logprobs: list[TokenLogprobs] | None,
    prompt_logprobs: list[TokenLogprobs] | None,
    num_draft_tokens: int,
) -> EngineOutput:
    """Return the output of a request that has new tokens or logprobs of its prompt; its last one if it has finished."""
    return EngineOutput(
        request_id=request.request_id,
        new_token_ids=new_token_ids,
        finish_reason=request.finish_reason,
        stop_reason=new_token_ids[-1] if request.finish_reason == "stop" else None,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=request.num_cached_tokens,
        queue_seconds=request.queue_seconds or 0.0,
        num_draft_tokens=num_draft_tokens,
    )


def _embedded(request: Request, embedding: np.ndarray) -> EngineOutput:
    """Return the output of a request for an embedding."""
    return EngineOutput(
        request_id=request.request_id,
        finish_reason="stop",
        num_cached_tokens=request.num_cached_tokens,
        queue_seconds=request.queue_seconds or 0.0,
        embedding=embedding.astype("<f4").tobytes(),
    )


def _corrupted(request: Request) -> EngineOutput:
    error = "the model's output for this request was not a number"
    return EngineOutput(request_id=request.request_id, finish_reason="error", error=error)


def _logprobs(request: Request, token_ids: list[int], logprobs: HostLogprobs, first: int) -> list[TokenLogprobs] | None:
    """Return the logprobs of drawn tokens, of which the step's `first` entry is the first; None if there are none."""
    params = request.asked.params
    if params.logprobs is None or not token_ids:
        return None
    asked = params.logprob_token_ids or ()
    return [
        logprobs.entry(first + column, token_id, params.logprobs, asked=asked)
        for column, token_id in enumerate(token_ids)
    ]


def _refused(request_id: str, error: JaxserveError) -> EngineOutput:
    return EngineOutput(request_id=request_id, finish_reason="error", error=str(error), refusal=Refusal.of(error))
