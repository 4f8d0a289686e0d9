"""The scaled matmul for Hopper (sm_90a), in Mosaic GPU: many rows at the speed of the tensor cores for 8 bits.

Persistent thread blocks take one tile after the other. Rows are operand A of wgmma and weights, which lie [outputs, K]
as in a checkpoint, operand B. One warpgroup streams both operands through a ring in shared memory and goes on with the
next tile while the two that multiply store this one. The thread blocks of a cluster have rows of their own and the same
weights: each fetches a part and TMA writes it to all.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.device.product_of_tiles import BYTES, ROWS, UNITS, Config, Problem, launch
from pallas_kernels.quantized_matmuls import QuantizedMatrix
from pallas_kernels.row_quantization import CODES

COLUMNS = BYTES
"""Columns of K in a step of the ring."""
PIECE = 32
"""Outputs that are stored at a time, at most."""
TILE = UNITS * ROWS
"""Rows of a tile. With fewer rows a tile would be larger than the operand."""


def heuristic(num_rows: int, weight: QuantizedMatrix) -> Config:
    """Return the best measured way to cut such a number of rows, see NOTES.md."""
    if weight.code == "int8" or weight.group_size != weight.depth:
        return Config(outputs=128, cluster=1 if num_rows <= 512 else 2)
    return Config(outputs=96 if num_rows > 512 else 64, cluster=1)


def why_not_values(weight: QuantizedMatrix) -> str | None:
    """Return why values of such a weight are not codes of 8 bits times scales, or None if they are."""
    if weight.code not in CODES:
        return f"codes of 8 bits, got {weight.code}"
    if any(array is not None for array in (weight.zeros, weight.minimums, weight.factors)):
        return "scales alone, got zero points, minimums or factors of scales"
    return None


def why_not_matrix(weight: QuantizedMatrix) -> str | None:
    """Return why the kernel cannot multiply quantized rows by such a weight, or None if it can: arrays, or shapes."""
    if (reason := why_not_values(weight)) is not None:
        return reason
    if weight.depth % COLUMNS or weight.shape[-2] % 16 or weight.shape[-2] < 256:
        return (
            f"K in multiples of {COLUMNS} and outputs in multiples of 16, at least 256, got a weight of shape "
            f"{weight.shape}"
        )
    if weight.group_size % COLUMNS:
        return f"scales of all columns or of multiples of {COLUMNS}, got {weight.group_size}"
    if weight.code == "int8" and weight.group_size != weight.depth:
        return f"int8 with a scale for each output, got one for {weight.group_size} of {weight.depth} columns"
    return None


# Jitted: the layers of a model share one trace and one compilation.
@functools.partial(jax.jit, static_argnames=("activation", "output_dtype", "config", "interpret"))
def scaled_matmul_sm90(
    x: Shaped[Array, "M K"],
    x_scales: Float[Array, " M"],
    weight: QuantizedMatrix,
    *,
    activation: Callable[[Array], Array] | None,
    output_dtype: Any = jnp.bfloat16,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    """See `scaled_matmul`. `interpret` swaps in what the interpreter of `plgpu.force_gpu_interpret_mode` lacks."""
    num_rows, depth = x.shape
    is_gated, num_outputs = weight.is_gated, weight.shape[-2]
    config = config or heuristic(num_rows, weight)
    num_scales = weight.scales.shape[-1]
    problem = Problem(
        outputs=config.outputs,
        is_gated=is_gated,
        cluster=config.cluster,
        band=max(1, config.band // config.cluster),
        columns=COLUMNS,
        piece=math.gcd(config.outputs, PIECE),
        pieces_held=2,
        num_rows=num_rows,
        num_outputs=num_outputs,
        depth=depth,
        steps_of_scale=weight.group_size // COLUMNS,
        num_groups=config.num_blocks // config.cluster,
        promotes=x.dtype == jnp.float8_e4m3fn,
        activation=activation,
        interpret=interpret,
    )
    halves = 1 + is_gated
    padded_rows = problem.row_tiles * TILE * problem.cluster
    padded_outputs = problem.output_tiles * problem.tile
    x_scales = jnp.pad(x_scales.astype(jnp.float32), (0, padded_rows - num_rows))
    scales = jnp.moveaxis(weight.scales.astype(jnp.float32).reshape(halves, num_outputs, num_scales), 2, 0)
    scales = jnp.pad(scales, ((0, 0), (0, 0), (0, padded_outputs - num_outputs)))

    codes = weight.codes.reshape(halves, num_outputs, depth)
    return launch(problem, x, codes, x_scales, scales, name="scaled_matmul", output_dtype=output_dtype)
