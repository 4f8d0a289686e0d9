"""Launches a step in parts, so that the GPU runs the first layers while the host still launches the others.

XLA puts the kernels of a program into one command buffer, none of which runs before the last one is in CUDA's queue:
that takes a millisecond for 32 layers, out of seven that a lone prompt of 128 tokens takes. What jax and XLA do before
that, for each program, takes as long again. Where steps overlap all of this is hidden.
"""

import jax
from jaxtyping import Array, Float

from jaxserve.layers.batch import Batch, Launch

MIN_LAYERS = 16
"""Models of fewer layers are launched at once."""

FIRST_PROGRAM = 5
"""A launch in two programs begins with num_layers / d layers, for this divisor d. The first program is short, since the
GPU waits for it.
"""

CUTS: dict[Launch, tuple[float, ...]] = {"at once": (), "in parts": (8, 2), "in programs": (1.75,)}
"""The launch of a program is cut after num_layers / d layers, for each of these divisors d. The first part is short for
the same reason; the next ones are launched while it runs.
"""


def spans_of_programs(num_layers: int) -> tuple[range, range]:
    """Return the layers of both programs of a launch in programs."""
    first = int(num_layers / FIRST_PROGRAM)
    return range(first), range(first, num_layers)


def cut_launch(x: Float[Array, "T E"], batch: Batch, *, index: int, num_layers: int) -> Float[Array, "T E"]:
    """Return the residual stream after a layer, unchanged, cutting the launch there if `batch.launch` has a cut after
    it.

    A cut is a loop that does nothing, with a fixed number of iterations: XLA leaves it out of command buffers, and the
    host does not wait for it.
    """
    if num_layers < MIN_LAYERS or index + 1 not in [int(num_layers / fraction) for fraction in CUTS[batch.launch]]:
        return x
    one = (batch.num_rows >= 0).astype(x.dtype)  # which XLA cannot know
    corner = jax.lax.fori_loop(0, 2, lambda _, corner: corner * one, x[:1, :1])
    return x.at[:1, :1].set(corner)
