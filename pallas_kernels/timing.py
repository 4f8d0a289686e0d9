"""What all benchmarks have in common: inputs, `measure` and `compare`, and the peak rates of lower bounds."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Measured on one H200: a copy through its memory, and a bf16 matrix product of 8192^3 on random data.
PEAK_BYTES_PER_SECOND = 4.3e12
PEAK_FLOPS_PER_SECOND = 760e12

L2_BYTES = 60 * 2**20

MIN_CALLS = 16
"""Minimum calls of a kernel in a program that makes a plan of the step once for all calls, as for the layers of a
model: the plan's part of a call's time is then negligible.
"""


LAYERS = 6
"""With weights of their own, more than the L2 holds."""
CALLS = 24
"""Calls per program, since launching a program takes as long as a kernel."""
OF_LAYER: dict[str, Any] = {"activation": jax.nn.silu, "eps": 1e-5}
"""Options of the operations that are a layer's matmuls."""

REPEATS = 10
"""Measurements, of which the median counts."""


class Row(NamedTuple):
    """One line of a benchmark's table: the cost of a case in one implementation, ours or another."""

    case: str
    implementation: str
    microseconds: float | None
    """None if it does not run here; `note` says why."""
    floor_microseconds: float | None = None
    """Time an H200 needs for the bytes or the operations alone; None on other devices."""
    note: str = ""


def on_gpu() -> bool:
    """Return true if jax's default device is a GPU; otherwise cases are small, and have no lower bound."""
    return jax.default_backend() == "gpu"


def floor(*, num_bytes: float = 0.0, flops: float = 0.0) -> float | None:
    """Microseconds that an H200 needs at least to move `num_bytes` through its memory and to do `flops` in bf16."""
    if not on_gpu():
        return None
    return max(num_bytes / PEAK_BYTES_PER_SECOND, flops / PEAK_FLOPS_PER_SECOND) * 1e6


def num_rotations(bytes_per_call: int) -> int:
    """Return how many sets of inputs `measure` needs so that none is left in the L2 cache when it is used again.

    At most 32: inputs that small are read from the L2 cache in real use too.
    """
    return min(32, max(2, -(-3 * L2_BYTES // max(bytes_per_call, 1)))) if on_gpu() else 2


def random_arrays(seed: int, *shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Return normally distributed arrays, in bfloat16 on a GPU and in float32 elsewhere."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    dtype = jnp.bfloat16 if on_gpu() else jnp.float32
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))


def with_plan(inputs: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Repeat the inputs until there are at least `MIN_CALLS`, for `measure` with a carry."""
    return [*inputs] * (-(-MIN_CALLS // len(inputs)) if on_gpu() else 1)


def measure(function: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], *, carry: Any = None) -> float:
    """Return the median microseconds of one call of `function(*args)`, where `inputs` has the args of several calls.

    All of them are one jitted program, so that launches are not measured; they must all differ, because XLA computes
    equal calls only once. With a `carry`, for an operation that works in place, a call is `carry = function(carry,
    *args)`, and the carry is donated; then inputs may repeat.
    """

    def program(carry: Any, inputs: Sequence[tuple[Any, ...]]) -> tuple[Any, Any]:
        outputs = []
        for args in inputs:
            if carry is None:
                outputs.append(function(*args))
            else:
                carry = function(carry, *args)
        return carry, outputs

    run = jax.jit(program, donate_argnums=0).lower(carry, inputs).compile()
    # While a GPU runs one program, the next one waits in its queue, which hides the host's time to launch it.
    programs = 8 if on_gpu() else 1
    seconds = []
    for repeat in range(REPEATS + 2):
        start = time.perf_counter()
        outputs = None
        for _ in range(programs):
            carry, outputs = run(carry, inputs)
        jax.block_until_ready((carry, outputs))
        if repeat >= 2:  # XLA records its command buffers in the first runs
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / (programs * len(inputs)) * 1e6


def ours(operation: Callable[..., Any], **options: Any) -> dict[str, Callable[..., Any]]:
    """Return calls of an operation, by name, with those of its implementations that run here."""
    names = ("sm90", "xla") if on_gpu() else ("xla",)
    return {name: functools.partial(operation, **options, implementation=name) for name in names}


def compare(
    case: str,
    calls: Mapping[str, Callable[..., Any]],
    inputs: Sequence[tuple[Any, ...]],
    *,
    bound: float | None = None,
    carry: Any = None,
    operations: int = 1,
) -> Iterator[Row]:
    """Yield a row for each implementation of a case, `calls` by name, timed by `measure` with a copy of the carry.

    A call consists of so many `operations`; `bound` is the `floor` of one.
    """
    for name, call in calls.items():
        took = measure(call, inputs, carry=jax.tree.map(jnp.copy, carry)) / operations
        yield Row(case, name, took, bound)


def compare_layers(
    case: str, num_rows: int, hidden: int, layers: Sequence[Any], calls: Mapping[str, Callable[..., Any]]
) -> Iterator[Row]:
    """Yield a row for each way to compute a layer, called as `layer_matmuls` is: one layer after the other, with what
    would be a layer's queries, by a copy of them, as the next one's heads.
    """

    def run(layer: Callable[..., Any], carry: Any, weights: Any, gain: jax.Array) -> Any:
        heads, x = carry
        x, y = layer(heads, x, weights, (gain, gain))
        return y[:, : heads.shape[1]], x

    *start, gain = random_arrays(1, (num_rows, hidden), (num_rows, hidden), (hidden,))
    inputs = [(layers[call % LAYERS], gain) for call in range(CALLS)]
    bound = floor(num_bytes=sum(array.nbytes for array in jax.tree.leaves(layers[0])))
    runs = {name: functools.partial(run, layer) for name, layer in calls.items()}
    yield from compare(case, runs, inputs, carry=tuple(start), bound=bound)
