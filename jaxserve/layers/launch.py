"""A step's launch in parts, so that the GPU is at the first layers while the host still launches the others.

XLA puts the kernels of a program into one command buffer, of which none runs before the last one is in CUDA's queue: a
millisecond for 32 layers, of seven that a lone prompt of 128 tokens takes. What jax and XLA do before that, for each
program, takes as long again. Where steps overlap nobody waits for any of it.
"""

from typing import Any

import jax
from jaxtyping import Array, Float

from jaxserve.layers.batch import Batch, Launch

MIN_LAYERS = 16
"""Models of fewer layers are launched at once."""

CUTS: dict[Launch, tuple[float, ...]] = {"at once": (), "in parts": (8, 2), "in programs": (5, 1.75)}
"""Behind which shares of the layers the launch is cut, the number of layers over this. The first part is short, since
the GPU waits for it; the next are launched while it runs.
"""


def cut_launch(x: Float[Array, "T E"], batch: Batch, *, index: int, num_layers: int) -> Float[Array, "T E"]:
    """The residual stream behind a layer, as it is. If the launch is cut there, behind a loop that does nothing to it,
    of a known number of turns: XLA leaves it out of command buffers, and the host does not wait for it. The first cut
    of a launch in programs is a boundary for `execution.programs.parts` instead.
    """
    cuts = [int(num_layers / share) for share in CUTS[batch.launch]]
    if num_layers < MIN_LAYERS or index + 1 not in cuts:
        return x
    if batch.launch == "in programs" and index + 1 == cuts[0]:
        return launch_boundary(x)
    one = (batch.num_rows >= 0).astype(x.dtype)  # which XLA cannot know
    corner = jax.lax.fori_loop(0, 2, lambda _, corner: corner * one, x[:1, :1])
    return x.at[:1, :1].set(corner)


def launch_boundary(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Nothing but a mark in what is traced."""
    return jax.jit(_boundary_of_programs)(x)


def _boundary_of_programs(x: Array) -> Array:
    return x


def is_boundary(equation: Any) -> bool:
    """Whether this equation of a jaxpr is such a mark."""
    return equation.params.get("name") == _boundary_of_programs.__name__
