"""A step's launch in parts, so that the GPU is at the first layers while the host still launches the others.

XLA puts the kernels of a program into one command buffer, of which none runs before the last one is in CUDA's queue: a
millisecond for 32 layers, of nine that a lone prompt of 128 tokens takes. Where steps overlap nobody waits for that.
"""

import jax
from jaxtyping import Array, Float

from jaxserve.layers.batch import Batch

MIN_LAYERS = 16
"""Models of fewer layers are launched at once."""


def cut_launch(x: Float[Array, "T E"], batch: Batch, *, index: int, num_layers: int) -> Float[Array, "T E"]:
    """The residual stream behind a layer, as it is. If the launch is cut there, behind a loop that does nothing to it,
    of a known number of turns: XLA leaves it out of command buffers, and the host does not wait for it.

    The first part is short, since the GPU waits for it; the next are launched while it runs.
    """
    if not batch.is_launched_in_parts or num_layers < MIN_LAYERS or index + 1 not in (num_layers // 8, num_layers // 2):
        return x
    one = (batch.num_rows >= 0).astype(x.dtype)  # which XLA cannot know
    corner = jax.lax.fori_loop(0, 2, lambda _, corner: corner * one, x[:1, :1])
    return x.at[:1, :1].set(corner)
