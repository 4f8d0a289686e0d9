"""The bubble of a pipeline: the part of the time in which its stages wait, simulated and measured."""

import dataclasses
import statistics
import time
from collections.abc import Sequence

import jax

from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.execution.programs.kinds import Program
from jaxserve.execution.programs.shapes import PLAIN_DECODE
from jaxserve.inspect.engine import engine_of, plans_passed_to, wait_until_warm
from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.plan import StepPlan

NUM_RUNS = 20
"""Runs of a stage alone, of which the fastest counts: whatever else the machine does only makes one slower."""

NUM_PLANS = 200
"""Simulated plans, of which the second half is in a steady state."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bubble:
    """Decode steps of `rows` requests in as many parts as there are stages.

    Attributes:
        stage_seconds: the time of each stage for one part, alone: the fastest of several runs.
        plan_seconds: the time from one plan to the next: the median over as many plans as there are stages, since plans
            of different parts may start close together.
    """

    rows: int
    stage_seconds: tuple[float, ...]
    plan_seconds: float

    @property
    def simulated(self) -> float:
        """The fraction of time in which stages wait, if they take as long as alone."""
        return simulate(self.stage_seconds, num_in_flight=len(self.stage_seconds))

    @property
    def simulated_without_overlap(self) -> float:
        """The simulated fraction with one plan in flight."""
        return simulate(self.stage_seconds, num_in_flight=1)

    @property
    def measured(self) -> float:
        """The fraction of the measured time. It is slightly below 0 where stages never wait, since a stage alone also
        waits for the host.
        """
        return _waiting(self.stage_seconds, self.plan_seconds)

    def __repr__(self) -> str:
        stages = ", ".join(f"{1e3 * seconds:.2f}" for seconds in self.stage_seconds)
        return (
            f"{self.rows} rows; stages alone: {stages} ms; a plan every {1e3 * self.plan_seconds:.2f} ms\n"
            f"stages wait {self.measured:.0%} of the time; simulated {self.simulated:.0%}, with one plan in flight "
            f"{self.simulated_without_overlap:.0%}"
        )


def simulate(stage_seconds: Sequence[float], *, num_in_flight: int) -> float:
    """Return the fraction of time in which stages wait, where each plan continues rows of the plan that is
    `num_in_flight` before it, and stages run plans in order.
    """
    free, ends = [0.0] * len(stage_seconds), [0.0] * num_in_flight
    for plan in range(NUM_PLANS):
        end = ends[plan]
        for stage, seconds in enumerate(stage_seconds):
            end = free[stage] = max(end, free[stage]) + seconds
        ends.append(end)
    half = NUM_PLANS // 2
    return _waiting(stage_seconds, (ends[-1] - ends[-1 - half]) / half)


def bubble(llm: LLM, *, rows: int, num_tokens: int = 32) -> Bubble:
    """Measure the steps of `rows` requests of `num_tokens` tokens each, which must all run at once, when nothing is
    compiled in the background any more. Raises ConfigError for an engine of one stage, and InvalidRequest for numbers
    that it does not have.
    """
    engine = engine_of(llm)
    runner = engine.runner
    if runner.num_stages == 1:
        raise ConfigError("pipeline_parallel_size is 1: one stage waits for no other")
    limit = runner.model.max_num_seqs
    if not runner.num_stages <= rows <= limit:
        raise InvalidRequest(f"rows must be between {runner.num_stages} and {limit}, got {rows}", param="rows")
    wait_until_warm(llm)
    part = -(-rows // runner.num_stages)
    starts: list[tuple[float, bool]] = []

    def see(plan: StepPlan) -> None:
        is_part = len(plan.rows) == plan.num_tokens in (part, rows // runner.num_stages)
        starts.append((time.perf_counter(), is_part))

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    with plans_passed_to(see, engine):
        for _ in range(2):  # the first time, programs may be compiled
            starts.clear()
            prompts = [[2 + row % 97, 3] for row in range(rows)]
            llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    count = runner.num_stages
    windows = (starts[first : first + count + 1] for first in range(len(starts) - count))
    times = [(window[-1][0] - window[0][0]) / count for window in windows if all(is_part for _, is_part in window)]
    if not times:
        raise InvalidRequest(f"num_tokens is {num_tokens}, of which no step is alike", param="num_tokens")
    step = runner.builder.shapes.step_for(part, PLAIN_DECODE)

    def seconds(programs: Sequence[Program]) -> float:
        start = time.perf_counter()
        for program in programs:
            jax.block_until_ready(runner.run_empty(program))
        return time.perf_counter() - start

    stages: list[list[Program]] = [*([program] for program in step.stages), step.of_last_stage]
    alone = [min(seconds(programs) for _ in range(NUM_RUNS)) for programs in stages]
    return Bubble(rows=rows, stage_seconds=tuple(alone), plan_seconds=statistics.median(times))


def _waiting(stage_seconds: Sequence[float], plan_seconds: float) -> float:
    return 1 - sum(stage_seconds) / (len(stage_seconds) * plan_seconds)
