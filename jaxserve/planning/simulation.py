"""A server on a virtual clock: the engine's own scheduler, with steps that take the times that `times` predicts.

Like an engine, the simulation plans a step while the one before runs, and a step takes the time of its compiled size.
HTTP and the host cost nothing here, and prefixes are not shared.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxserve.bench.serving.client import Outcome
from jaxserve.bench.serving.load import LoadResult
from jaxserve.bench.serving.workloads import Call
from jaxserve.errors import ConfigError
from jaxserve.execution.programs.shapes import StepNeeds
from jaxserve.planning.plan import stages_of
from jaxserve.planning.sizes import Absent
from jaxserve.planning.times import estimate_prefill, estimate_step
from jaxserve.planning.work import MAX_ROWS_IN_16_BITS, Work, decode_work
from jaxserve.request import EngineRequest
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import RowOutcome, SchedulerLimits, make_scheduler

MIN_PROMPT_TOKENS = 256
"""Prompt tokens for which an adaptive budget always has room: a step of so few is bound by reading the weights."""

CONTEXT_STEP = 1024
"""Tokens to which the contexts of a step are rounded, all of its rows together, so that a time is computed once."""


class Decoding(NamedTuple):
    """The rows of a step that decode: their number, and the tokens of their contexts together."""

    num_rows: int
    context: int


NOTHING = Decoding(0, 0)


class StepTimes:
    """Predicted seconds of the steps of an engine. Raises ConfigError if it is not on one device, or drafts tokens."""

    def __init__(self, engine: Absent):
        self._gpu, self._model, self._info = engine.gpu, engine.model, engine.info(engine.num_blocks)
        (self._kind, _, num_devices), *later_stages = stages_of(engine)
        if later_stages or num_devices > 1 or engine.plan.builder.model.drafting is not None:
            raise ConfigError("steps are simulated on one device and without speculation: leave these options out")
        self._shapes = engine.plan.builder.shapes
        self._sizes: dict[tuple[int, bool], int] = {}
        self._factors: dict[int, float] = {}
        self._decode: dict[tuple[int, int], float] = {}

    def of(self, plan: StepPlan) -> float:
        """Return the seconds of a step."""
        single, chunks = plan.rows[: plan.num_decode_rows], plan.rows[plan.num_decode_rows :]
        decoding = Decoding(len(single), sum(row.start + 1 for row in single))
        if not chunks:
            return self._of_decoding(decoding)
        read = sum(self._info.kv_bytes_read(row.start) for row in chunks)
        attention = sum(self._model.attention_products(row.start, row.num_tokens) for row in chunks)
        return self.mixed(plan.num_tokens, decoding, num_rows=len(plan.rows), read=read, attention=attention)

    def mixed(
        self, num_tokens: int, decoding: Decoding, *, num_rows: int, read: float = 0.0, attention: float = 0.0
    ) -> float:
        """Return the seconds of a step with prompt tokens, whose chunks read so many bytes of KV and need so many
        products of attention. Decoding rows in it add the reading of their contexts.
        """
        size = self.size(num_tokens)
        model, info = self._model, self._info
        work = Work(
            num_bytes=info.expected_weight_bytes(size) + read,
            products=2.0 * size * model.layer_parameters + 2.0 * num_rows * model.head_parameters + attention,
            in_8_bits=model.rounds_activations and size > MAX_ROWS_IN_16_BITS,
            sums=0,
            bytes_per_sum=0.0,
        )
        if size not in self._factors:
            self._factors[size] = estimate_prefill(self._kind, 1.0, num_tokens=size).seconds
        seconds = self._factors[size] * work.seconds(self._gpu, num_devices=1)
        if decoding.num_rows:
            kept = decoding.num_rows * info.kv_bytes_read(decoding.context / decoding.num_rows)
            seconds = max(seconds + kept / self._gpu.sustained_bandwidth, self._of_decoding(decoding))
        return seconds

    def size(self, num_tokens: int, *, is_decode_only: bool = False) -> int:
        """Return the tokens of the smallest compiled step for so many tokens."""
        key = num_tokens, is_decode_only
        if key not in self._sizes:
            step = self._shapes.step_for(num_tokens, StepNeeds(is_decode_only=is_decode_only))
            self._sizes[key] = step.forward.bucket.num_tokens
        return self._sizes[key]

    def _of_decoding(self, decoding: Decoding) -> float:
        num_rows = self.size(decoding.num_rows, is_decode_only=True)
        context = round(decoding.context / CONTEXT_STEP) * CONTEXT_STEP
        if (num_rows, context) not in self._decode:
            work = decode_work(self._model, self._info, num_rows=num_rows, context=context / num_rows)
            seconds = work.seconds(self._gpu, num_devices=1)
            self._decode[num_rows, context] = estimate_step(self._kind, seconds, num_rows=num_rows).seconds
        return self._decode[num_rows, context]


type Budget = Callable[[Decoding, float], int]
"""The budget of the next step, by what decodes in it and how many seconds the first request without a token waits."""


def fixed(num_tokens: int) -> Budget:
    """Return the budget of so many tokens."""
    return lambda _decoding, _waited: num_tokens


def adaptive(times: StepTimes, largest: int, *, target: float, patience: float = float("inf")) -> Budget:
    """Return a budget for steps of at most `target` seconds while requests decode, without a limit where nobody does,
    or where the first request without a token has waited longer than `patience`.

    It knows the times exactly: one that learns them can be as good, not better.
    """
    sizes = sorted({times.size(num_tokens) for num_tokens in range(64, largest + 1, 64)})

    def budget(decoding: Decoding, waited: float) -> int:
        if not decoding.num_rows or waited > patience:
            return largest
        num_rows = decoding.num_rows + 1
        least = times.size(min(num_rows + MIN_PROMPT_TOKENS, largest))
        return max([least, *(size for size in sizes if times.mixed(size, decoding, num_rows=num_rows) <= target)])

    return budget


def simulate(
    times: StepTimes, limits: SchedulerLimits, calls: Sequence[Call], arrivals: Sequence[float], budget: Budget
) -> LoadResult:
    """Serve these calls, which arrive at these times in seconds, ascending."""
    scheduler = make_scheduler("continuous", limits, enable_prefix_caching=False)
    outcomes = [Outcome(index=index, due=time, sent=time, is_counted=True) for index, time in enumerate(arrivals)]
    in_flight: deque[tuple[StepPlan, float]] = deque()
    params, decoding = SamplingParams(), NOTHING
    num_arrived = first = 0
    now = busy_until = 0.0
    while num_arrived < len(calls) or scheduler.has_work or in_flight:
        while num_arrived < len(calls) and arrivals[num_arrived] <= now:
            call, name = calls[num_arrived], str(num_arrived)
            request = EngineRequest(
                request_id=name,
                group_id=name,
                prompt_token_ids=[0] * call.num_prompt_tokens,
                params=params,
                max_tokens=call.output_len,
            )
            scheduler.add([request])
            num_arrived += 1
        while first < num_arrived and outcomes[first].chunk_times:
            first += 1
        waited = now - arrivals[first] if first < num_arrived else 0.0
        plan = scheduler.schedule(budget(decoding, waited))
        if plan is not None:
            sampling = [row for row in plan.rows if row.samples]
            decoding = Decoding(len(sampling), sum(row.start + row.num_tokens for row in sampling))
            busy_until = max(now, busy_until) + times.of(plan)
            in_flight.append((plan, busy_until))
        if in_flight and (plan is None or len(in_flight) > 1):
            oldest, now = in_flight.popleft()
            for row, end in zip(oldest.rows, scheduler.update(oldest, [[0] for _ in oldest.rows]), strict=True):
                outcome = outcomes[int(row.request.request_id)]
                if end in (RowOutcome.TOKEN, RowOutcome.LAST_TOKEN):
                    outcome.chunk_times.append(now)
                    outcome.num_output_tokens += 1
                    outcome.ended = now
        elif plan is None and num_arrived < len(calls):
            now, decoding = arrivals[num_arrived], NOTHING
    return LoadResult(outcomes, 0.0, 0, 0.0)


def capacity(times: StepTimes, limits: SchedulerLimits, calls: Sequence[Call]) -> float:
    """Return the requests a second of the middle half of calls that are all there at the start. Raises ConfigError for
    fewer than 4 calls.
    """
    if len(calls) < 4:
        raise ConfigError(f"a capacity needs at least 4 requests, got {len(calls)}")
    result = simulate(times, limits, calls, [0.0] * len(calls), fixed(limits.max_num_batched_tokens))
    ends = sorted(outcome.ended for outcome in result.outcomes)
    quarter = len(ends) // 4
    return 2 * quarter / (ends[3 * quarter] - ends[quarter])


def limits_of(engine: Absent) -> SchedulerLimits:
    """Return the limits of an engine's scheduler."""
    spec = engine.plan.builder.spec
    return SchedulerLimits(
        num_blocks=engine.num_blocks,
        block_size=spec.block_size,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_model_len=spec.max_model_len,
        windows=engine.plan.builder.model.layout.windows,
    )
