"""How long a step will take: the time of its work, and what steps like it took beyond theirs, as measured.

A step of decoding takes the time of its work and, beyond it, some time for each layer, which depends on the kind of
layer and on the rows, and little on the layer's size. Measured runs of models like this one say how much, weighted by
likeness. A run of the model itself decides alone. The error that is stated is that of the table: each of its runs is
predicted from the others, or from those of other models.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxserve.planning.measured import MEASURED, Batches, Run

OTHER_TYPE = 2.0
OTHER_WEIGHTS = 3.0
OTHER_NUM_DEVICES = 1.0
OTHER_STATES = 0.5
PER_DOUBLING_OF_ROWS = 0.5
PER_DOUBLING_OF_LAYER = 1.0
"""What makes two runs unlike; e to the power of minus their sum is the weight of a run. They are chosen so that runs of
the table are predicted best from runs of other models.
"""

BETWEEN_MACHINES = 0.04
"""Relative difference of machines of one kind, as measured: no prediction is better."""

WITHOUT_KERNELS = 0.5
"""Error of times in plain XLA, relative: they were measured for one model on one GPU, which has kernels."""

UNLIKE_ANY = 0.25
"""Error of times of what no measured run has, relative: more devices, whose sums are assumed to scale, whole experts on
each device, keys and values of 8 bits, speculation.
"""

OF_STAGES = 0.11
"""Error, root mean square, of planned steps of two stages whose layers were measured: `planning.held_out` prints it."""

FAR = 2.0
"""Doublings of the size of a layer, from the most similar measured run, beyond which the error is `WITHOUT_KERNELS`:
each run of the table has one of another model within a factor of two.
"""

ALIKE = 0.25
"""Largest distance of runs that are of the same model in nearly the same batch."""


class Estimate(NamedTuple):
    """A predicted time in seconds."""

    seconds: float
    work: float
    error: float
    """Relative; two of three steps are expected to be that near."""
    source: str
    """What it is predicted from, for people."""

    @property
    def factor(self) -> float:
        """The time, relative to that of the work."""
        return self.seconds / self.work


class Kind(NamedTuple):
    """What decides which measured runs are like a model's."""

    model_type: str
    weights: str
    num_devices: int
    kernels: str
    has_experts: bool
    num_layers: int
    has_states: bool = False
    """True if some layers keep a state of each request in place of keys and values."""
    num_stages: int = 1
    is_unlike_any: bool = False
    """True if it has something that no measured run has, except for more devices."""


def estimate_step(kind: Kind, work: float, *, num_rows: int, measured: tuple[Batches, ...] = MEASURED) -> Estimate:
    """Predict the time of a decode step from the seconds of its work and from measured runs. Of several stages,
    `kind` and `work` are those of one.
    """
    runs = _runs(measured, kernels=kind.kernels)
    if kind.kernels == "xla":
        return Estimate(work * _mean_factor(runs), work, WITHOUT_KERNELS, "runs in plain XLA on an H200")
    seconds = _predicted(kind, work, num_rows, runs)
    distance, (batches, run) = min(
        ((_distance(kind, work, num_rows, *each), each) for each in runs), key=lambda pair: pair[0]
    )
    if distance <= ALIKE:
        source = f"{batches.shape} on {_devices(batches)}, {run.num_rows} x {run.input_len} tokens"
        error = BETWEEN_MACHINES
    else:
        source = f"runs like it, most like {batches.shape} ({batches.weights}) on {_devices(batches)}"
        known = any((each.model_type, each.weights) == (kind.model_type, kind.weights) for each, _ in runs)
        errors = error_among_runs if known else error_among_models
        error = max(errors(measured, has_states=kind.has_states), BETWEEN_MACHINES)
    if kind.num_stages > 1:
        error = math.hypot(error, OF_STAGES)
    most_devices = max(each.num_devices * each.num_stages for each in measured)
    if kind.is_unlike_any or kind.num_devices * kind.num_stages > most_devices:
        error = max(error, UNLIKE_ANY)
    if abs(_doublings(kind, work, batches, run)) > FAR:
        error = WITHOUT_KERNELS
    return Estimate(seconds, work, error, source)


def estimate_prefill(kind: Kind, work: float, *, num_tokens: int, measured: tuple[Batches, ...] = MEASURED) -> Estimate:
    """Predict the time of prompts of so many tokens from the seconds of their work."""
    weighted = []
    runs = _runs(measured, kernels=kind.kernels)
    for batches, run in [each for each in runs if each[0].has_experts == kind.has_experts] or runs:
        if run.prefill is None or run.prefill_work is None:
            continue
        distance = _unlike(kind, batches)
        distance += PER_DOUBLING_OF_ROWS * abs(math.log2(num_tokens / (run.num_rows * run.input_len)))
        weighted.append((math.exp(-distance), math.log(run.prefill / run.prefill_work)))
    total = sum(weight for weight, _ in weighted)
    mean = sum(weight * value for weight, value in weighted) / total
    spread = math.sqrt(sum(weight * (value - mean) ** 2 for weight, value in weighted) / total)
    error = WITHOUT_KERNELS if kind.kernels == "xla" else max(spread, BETWEEN_MACHINES)
    return Estimate(work * math.exp(mean), work, error, "runs like it")


@functools.cache
def error_among_runs(measured: tuple[Batches, ...] = MEASURED, *, has_states: bool = False) -> float:
    """Return the error, root mean square, of runs that are predicted from all others of the table."""
    return _error(measured, has_states, lambda batches, run, other, other_run: (batches, run) == (other, other_run))


@functools.cache
def error_among_models(measured: tuple[Batches, ...] = MEASURED, *, has_states: bool = False) -> float:
    """Return the error, root mean square, of runs that are predicted from those of other models, or other weights."""
    return _error(
        measured,
        has_states,
        lambda batches, _, other, __: (
            (batches.shape, batches.weights, batches.num_devices) == (other.shape, other.weights, other.num_devices)
        ),
    )


def _error(
    measured: tuple[Batches, ...], has_states: bool, is_left_out: Callable[[Batches, Run, Batches, Run], bool]
) -> float:
    """Return the error of runs of models with or without states; UNLIKE_ANY if there are none."""
    runs = _runs(measured, kernels="sm90")
    errors = []
    for batches, run in runs:
        if batches.has_states != has_states:
            continue
        others = [other for other in runs if not is_left_out(batches, run, *other)]
        seconds = _predicted(kind_of(batches), run.work / 1e3, run.num_rows, others)
        errors.append(seconds / (run.step / 1e3) - 1)
    return math.sqrt(sum(error**2 for error in errors) / len(errors)) if errors else UNLIKE_ANY


def kind_of(batches: Batches) -> Kind:
    """Return the kind of measured runs."""
    return Kind(
        model_type=batches.model_type,
        weights=batches.weights,
        num_devices=batches.num_devices,
        kernels=batches.kernels,
        has_experts=batches.has_experts,
        num_layers=batches.num_layers,
        has_states=batches.has_states,
        num_stages=batches.num_stages,
    )


def _predicted(kind: Kind, work: float, num_rows: int, runs: Iterable[tuple[Batches, Run]]) -> float:
    """Return the time of the work and what layers like these take beyond it, in seconds. Where steps took less than
    the time of their work, they were faster in proportion to it.
    """
    total = beyond = 0.0
    for batches, run in runs:
        if batches.has_experts == kind.has_experts:
            weight = math.exp(-_distance(kind, work, num_rows, batches, run))
            # A run of the same batch decides: the others are far less like it.
            weight = weight if weight < math.exp(-ALIKE) else weight * 1e3
            total += weight
            more = (run.step - run.work) / 1e3
            scale = kind.num_layers / batches.num_layers if more > 0 else work * 1e3 / run.work
            beyond += weight * scale * more
    return work + beyond / total


def _distance(kind: Kind, work: float, num_rows: int, batches: Batches, run: Run) -> float:
    if batches.has_experts != kind.has_experts:
        return math.inf
    return (
        _unlike(kind, batches)
        + PER_DOUBLING_OF_ROWS * abs(math.log2(num_rows / run.num_rows))
        + PER_DOUBLING_OF_LAYER * abs(_doublings(kind, work, batches, run))
    )


def _doublings(kind: Kind, work: float, batches: Batches, run: Run) -> float:
    """Return the binary logarithm of the time of a layer's work, relative to that of a run's layer."""
    return math.log2((work * 1e3 / kind.num_layers) / (run.work / batches.num_layers))


def _unlike(kind: Kind, batches: Batches) -> float:
    distance = OTHER_TYPE * (batches.model_type != kind.model_type)
    distance += OTHER_WEIGHTS * (batches.weights != kind.weights)
    distance += OTHER_STATES * (batches.has_states != kind.has_states)
    return distance + OTHER_NUM_DEVICES * ((batches.num_devices > 1) != (kind.num_devices > 1))


def _mean_factor(runs: Sequence[tuple[Batches, Run]]) -> float:
    return math.exp(sum(math.log(run.step / run.work) for _, run in runs) / len(runs))


def _runs(measured: Sequence[Batches], *, kernels: str) -> list[tuple[Batches, Run]]:
    """Return the runs by which times are predicted: those of one stage."""
    return [
        (batches, run)
        for batches in measured
        if batches.kernels == kernels and batches.num_stages == 1
        for run in batches.runs
    ]


def _devices(batches: Batches) -> str:
    name = batches.gpu.upper()
    return f"an {name}" if batches.num_devices == 1 else f"{batches.num_devices} {name}s"
