"""`jaxserve bench steps`: the duration of each step of a batch, and the GPU kernels that run in it."""

import itertools
import statistics
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from jaxserve.bench.engine_run import Step, engine_of, timed_steps, traced, warm_up
from jaxserve.bench.report import table
from jaxserve.bench.workloads import BatchShape
from jaxserve.config import EngineConfig

if TYPE_CHECKING:
    from jaxserve.engine.local import LocalEngineClient
    from jaxserve.engine.profile import Work

STEPS_HEADER = ("tokens", "of them first ones", "steps", "ms a step", "shortest", "longest")
KERNELS_HEADER = ("kernel", "runs", "us a run", "share of the time")
MAX_KERNELS = 25
"""Maximum number of kernels listed, those that take the most time."""


def run(config: EngineConfig, shapes: list[BatchShape], *, profile: bool) -> Iterator[str]:
    """Yield a report for each batch as soon as it has run: its steps in order, with consecutive equal ones on one line.

    With `profile` a second report follows, of another run that is traced: the GPU kernels in the second half of its
    time. Raises StartupError, InvalidRequest.
    """
    with engine_of(config) as client:
        for shape in shapes:
            yield _steps(client, shape)
            if profile:
                yield _kernels(client, shape)


def grouped(steps: Iterable[Step]) -> list[list[Step]]:
    """Group consecutive steps with the same numbers of tokens and of first tokens."""
    return [list(group) for _, group in itertools.groupby(steps, lambda step: (step.num_tokens, step.num_first))]


def _steps(client: "LocalEngineClient", shape: BatchShape) -> str:
    name = f"{shape.batch_size}-{shape.input_len}-{shape.output_len}"
    steps, _ = timed_steps(client, warm_up(client, shape, prefix=name), prefix=name)
    title = f"{shape.batch_size} x {shape.input_len} in, {shape.output_len} out: {sum(s.seconds for s in steps):.3f} s"
    return f"{title}\n\n{table(STEPS_HEADER, [_row(group) for group in grouped(steps)])}"


def _row(group: list[Step]) -> list[str]:
    milliseconds = [step.seconds * 1e3 for step in group]
    times = statistics.mean(milliseconds), min(milliseconds), max(milliseconds)
    counts = group[0].num_tokens, group[0].num_first, len(group)
    return [*map(str, counts), *(f"{value:.3f}" for value in times)]


def _kernels(client: "LocalEngineClient", shape: BatchShape) -> str:
    name = f"{shape.batch_size}-{shape.input_len}-{shape.output_len}-traced"
    return kernels_table(traced(client, shape.jobs(seed=2, vocab_size=client.info.vocab_size), prefix=name))


def kernels_table(work: "list[Work]") -> str:
    """Return a table of the GPU's kernels in the second half of a profile, and for what part of it any ran."""
    from jaxserve.engine.profile import busy_fraction, second_half, times_by_name

    if not work:
        return "no GPU was seen at work"
    late, span = second_half(work)
    rows = [
        [name[:80], str(num_runs), f"{seconds / num_runs * 1e6:.2f}", f"{seconds / (span / 1e9):.2%}"]
        for name, num_runs, seconds in times_by_name(late)[:MAX_KERNELS]
    ]
    return f"{table(KERNELS_HEADER, rows)}\n\nat work {busy_fraction(work):.2%} of the time"
