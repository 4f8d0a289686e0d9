"""The gated linear unit for Hopper (sm_90a), in Mosaic GPU: many rows at the speed of the tensor cores.

The kernel is that of `scaled_matmul`, for values that are not codes: a tile has the same outputs of gate and of up.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.device.product_of_tiles import BYTES, ROWS, UNITS, Config, Problem, launch

COLUMNS = BYTES // 2
"""Columns of K in a step of the ring."""
TILE = UNITS * ROWS
"""Rows of a tile. With fewer rows or outputs of gate, a tile would be larger than the operands."""


def heuristic(num_rows: int) -> Config:
    """Return the fastest configuration measured, see NOTES.md: for few rows, tiles that fill whole waves of CTAs."""
    return Config(outputs=112, cluster=1) if num_rows <= 512 else Config(outputs=128, cluster=2)


def why_not(
    x: Float[Array | jax.ShapeDtypeStruct, "M K"], weight: Float[Array | jax.ShapeDtypeStruct, "2 N K"]
) -> str | None:
    """Return why the kernel cannot do it, of arrays or their shapes, or None if it can."""
    if x.dtype != weight.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the gated linear unit takes bfloat16 or float16, got x of {x.dtype} and a weight of {weight.dtype}"
    if x.shape[0] < TILE:
        return f"the gated linear unit takes at least {TILE} rows, got {x.shape[0]}"
    if x.shape[1] % COLUMNS or weight.shape[1] % 8 or weight.shape[1] < TILE:
        return (
            f"the gated linear unit takes K in multiples of {COLUMNS} and outputs in multiples of 8, at least {TILE}, "
            f"got a weight of shape {weight.shape}"
        )
    return None


# Jitted, so that the layers of a model use one trace and one compilation.
@functools.partial(jax.jit, static_argnames=("activation", "config", "interpret"))
def gated_linear_unit_sm90(
    x: Float[Array, "M K"],
    weight: Float[Array, "2 N K"],
    *,
    activation: Callable[[Array], Array],
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    """Run the kernel, see `gated_linear_unit`. Raises NotImplementedError for what it does not support.

    `interpret` replaces what the interpreter of `plgpu.force_gpu_interpret_mode` lacks.
    """
    if (reason := why_not(x, weight)) is not None:
        raise NotImplementedError(reason)
    (num_rows, depth), num_outputs = x.shape, weight.shape[1]
    config = config or heuristic(num_rows)
    piece = math.gcd(config.outputs, COLUMNS)
    problem = Problem(
        outputs=config.outputs,
        is_gated=True,
        cluster=config.cluster,
        band=max(1, config.band // config.cluster),
        columns=COLUMNS,
        piece=piece,
        pieces_held=config.outputs // piece,
        num_rows=num_rows,
        num_outputs=num_outputs,
        depth=depth,
        steps_of_scale=depth,
        num_groups=config.num_blocks // config.cluster,
        promotes=False,
        activation=activation,
        interpret=interpret,
    )
    return launch(problem, x, weight, name="gated_linear_unit", output_dtype=x.dtype)
