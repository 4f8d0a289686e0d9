"""Engine: joins scheduler and runner. `step` plans step N + 1, starts it, then handles the tokens of step N."""

import contextlib
import time
from collections import deque

import jax

from jaxserve.engine.client import EngineStats
from jaxserve.execution.runner import HostLogprobs, PendingStep, Runner
from jaxserve.request import EngineOutput, EngineRequest, TokenLogprobs
from jaxserve.scheduling.plan import Row
from jaxserve.scheduling.scheduler import RowOutcome, Scheduler


class Engine:
    """One scheduler, one runner, at most one step in flight while the host works.

    Not thread-safe: one thread owns it (`local.LocalEngineClient`).
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, *, overlap: bool):
        self.scheduler = scheduler
        self.runner = runner
        self._max_in_flight = 1 if overlap else 0
        self._in_flight: deque[PendingStep] = deque()
        self._num_prompt_logprobs: dict[str, int] = {}
        self._num_corrupted = 0
        self._num_steps = 0
        self._num_step_tokens = 0
        self.seconds = {"schedule": 0.0, "wait": 0.0, "update": 0.0, "total": 0.0}

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._in_flight) or self.scheduler.has_work

    def add(self, requests: list[EngineRequest]) -> None:
        """Queue requests, all or none. Raises what `Scheduler.add` raises."""
        self.scheduler.add(requests)

    def abort(self, request_ids: list[str]) -> None:
        """Drop requests; their blocks are free for the next step."""
        self.scheduler.abort(request_ids)
        for request_id in request_ids:
            self._num_prompt_logprobs.pop(request_id, None)

    def step(self) -> list[EngineOutput]:
        """Start the next step, then return what the one before it has brought."""
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        self.seconds["schedule"] += time.perf_counter() - start
        if plan is not None:
            for request in plan.admitted:
                if request.queue_seconds is None:
                    request.queue_seconds = time.monotonic() - request.request.arrival_time
            self._in_flight.append(self.runner.dispatch(plan))
            self._num_steps += 1
            self._num_step_tokens += plan.num_tokens
        outputs = []
        while self._in_flight and (plan is None or len(self._in_flight) > self._max_in_flight):
            outputs += self._finish(self._in_flight.popleft())
        self.seconds["total"] += time.perf_counter() - start
        return outputs

    def close(self) -> None:
        """Free the device, once its steps and copies to the host are done: XLA aborts a process that ends before."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # a step that fails now is no one's
            for pending in self._in_flight:
                pending.token_ids()
                pending.is_corrupted()
        self.runner.close()

    def stats(self) -> EngineStats:
        """Counters and gauges as of now."""
        scheduler = self.scheduler.stats()
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.kv_cache_usage,
            kv_tokens_held=scheduler.kv_tokens_held,
            kv_positions_allocated=scheduler.kv_positions_allocated,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            num_compiles=self.runner.num_compiles,
            num_recompiles_after_warmup=self.runner.num_recompiles_after_warmup,
            num_corrupted_requests=self._num_corrupted,
            num_steps=self._num_steps,
            step_time_seconds=self.seconds["total"],
            num_step_tokens=self._num_step_tokens,
        )

    def _finish(self, pending: PendingStep) -> list[EngineOutput]:
        start = time.perf_counter()
        token_ids, corrupted = pending.token_ids(), pending.is_corrupted()
        waited = time.perf_counter()
        self.seconds["wait"] += waited - start
        outputs = self._update(pending, token_ids, corrupted)
        self.seconds["update"] += time.perf_counter() - waited
        return outputs

    def _update(self, pending: PendingStep, token_ids: list[int], is_corrupted: list[bool]) -> list[EngineOutput]:
        plan = pending.plan
        ok = [not corrupted for corrupted in is_corrupted] if any(is_corrupted) else None
        outcomes = self.scheduler.update(plan, token_ids, ok)
        logprobs = pending.logprobs()
        prompt_logprobs = pending.prompt_logprobs()
        outputs = []
        first_token = 0
        one_token = RowOutcome.TOKEN if logprobs is None and prompt_logprobs is None else None
        for index, (row, outcome, token_id) in enumerate(zip(plan.rows, outcomes, token_ids, strict=True)):
            request = row.request
            if outcome is one_token:  # nearly every row of nearly every step
                outputs.append(
                    EngineOutput(
                        request_id=request.request_id,
                        new_token_ids=[token_id],
                        num_cached_tokens=request.num_cached_tokens,
                        queue_seconds=request.queue_seconds or 0.0,
                    )
                )
            elif outcome is RowOutcome.FAILED:
                self._num_corrupted += 1
                self._num_prompt_logprobs.pop(row.request.request_id, None)
                outputs.append(
                    EngineOutput(
                        request_id=request.request_id,
                        finish_reason="error",
                        error="the model's output for this request was not a number",
                    )
                )
            elif outcome is not RowOutcome.DROPPED:
                params = request.request.params
                of_prompt = of_token = None
                if params.prompt_logprobs is not None and prompt_logprobs is not None:
                    of_prompt = self._take_prompt_logprobs(row, prompt_logprobs, first_token)
                if outcome is not RowOutcome.CHUNK or of_prompt:
                    new_token_ids = [] if outcome is RowOutcome.CHUNK else [token_id]
                    if params.logprobs is not None and logprobs is not None and new_token_ids:
                        of_token = [logprobs.entry(index, token_id, params.logprobs)]
                    outputs.append(
                        EngineOutput(
                            request_id=request.request_id,
                            new_token_ids=new_token_ids,
                            finish_reason=request.finish_reason,
                            stop_reason=token_id if request.finish_reason == "stop" else None,
                            logprobs=of_token,
                            prompt_logprobs=of_prompt,
                            num_cached_tokens=request.num_cached_tokens,
                            queue_seconds=request.queue_seconds or 0.0,
                        )
                    )
                if outcome is RowOutcome.LAST_TOKEN:
                    self._num_prompt_logprobs.pop(request.request_id, None)
            first_token += row.num_tokens
        return outputs

    def _take_prompt_logprobs(self, row: Row, logprobs: HostLogprobs, first_token: int) -> list[TokenLogprobs]:
        """Those of the prompt tokens behind the row's positions that have not been handed out before a preemption."""
        request = row.request
        num_top = request.request.params.prompt_logprobs
        assert num_top is not None
        done = self._num_prompt_logprobs.get(request.request_id, 0)
        end = min(row.start + row.num_tokens, request.num_prompt_tokens - 1)
        positions = range(max(row.start, done), end)
        self._num_prompt_logprobs[request.request_id] = max(done, end)
        return [
            logprobs.entry(first_token + position - row.start, request.token_ids[position + 1], num_top)
            for position in positions
        ]
