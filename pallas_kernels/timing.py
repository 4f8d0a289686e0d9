"""How the bench rows of every operation are timed: `measure`, and the peaks that floors are reckoned from."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

# Of one H200: a copy through its memory, and a bf16 matrix product of 8192^3 on random data.
PEAK_BYTES_PER_SECOND = 4.3e12
PEAK_FLOPS_PER_SECOND = 760e12

L2_BYTES = 60 * 2**20

MIN_CALLS = 16
"""Of a kernel whose program makes a plan of the step, once for all calls as for the layers of a model: so little of a
call's time is the plan's that it need not be told apart.
"""


class Row(NamedTuple):
    """One line of a bench table: what a case costs in one implementation, ours or a peer's."""

    case: str
    implementation: str
    microseconds: float | None
    """None if it does not run here; `note` says why."""
    floor_microseconds: float | None = None
    """What an H200 would need for the bytes or the operations alone; None on other devices."""
    note: str = ""


def on_gpu() -> bool:
    """Whether jax's default device is a GPU: else the cases are small, and nobody has a floor."""
    return jax.default_backend() == "gpu"


def floor(*, num_bytes: float = 0.0, flops: float = 0.0) -> float | None:
    """Microseconds that an H200 needs at least to move `num_bytes` through its memory and to do `flops` in bf16."""
    if not on_gpu():
        return None
    return max(num_bytes / PEAK_BYTES_PER_SECOND, flops / PEAK_FLOPS_PER_SECOND) * 1e6


def num_rotations(bytes_per_call: int) -> int:
    """How many sets of inputs `measure` needs so that none is left in the L2 when its turn comes again.

    At most 32: what is that small comes from the L2 in real life too.
    """
    return min(32, max(2, -(-3 * L2_BYTES // max(bytes_per_call, 1)))) if on_gpu() else 2


def with_plan(inputs: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The inputs again and again until they are for `MIN_CALLS` calls, for `measure` with a carry."""
    return [*inputs] * (-(-MIN_CALLS // len(inputs)) if on_gpu() else 1)


def measure(
    function: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], *, carry: Any = None, repeats: int = 10
) -> float:
    """Median microseconds of one call of `function(*args)`, where `inputs` has the args of several calls.

    All of them are one jitted program, so that the host's launches are not measured; they must all differ, for XLA does
    the same thing only once. With a `carry`, for an operation that works in place, it is `carry = function(carry,
    *args)`, donated, and gone afterwards; then inputs may come again.
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
    # A GPU runs a program that waits while it runs another: what the host needs to start it is hidden.
    programs = 8 if on_gpu() else 1
    seconds = []
    for repeat in range(repeats + 2):
        start = time.perf_counter()
        outputs = None
        for _ in range(programs):
            carry, outputs = run(carry, inputs)
        jax.block_until_ready((carry, outputs))
        if repeat >= 2:  # XLA records its command buffers in the first runs
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / (programs * len(inputs)) * 1e6
