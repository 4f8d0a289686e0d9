"""The gated linear unit for Hopper (sm_90a), in Mosaic GPU: many rows at the speed of the tensor cores.

Persistent CTAs process one tile after another. Rows are operand A of wgmma and weights, stored as [outputs, K] as in a
checkpoint, operand B: a tile has the same outputs of gate and of up. One warpgroup streams both operands through a ring
in shared memory and continues with the next tile while the two that multiply store this one. The CTAs of a cluster have
different rows and the same weights: each fetches a part and TMA multicasts it to all.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.gated_linear_unit.kernel import COLUMNS, ROWS, STAGES, UNITS, Global, Problem, Shared, kernel
from pallas_kernels.hopper import NUM_SMS

TILE = UNITS * ROWS
"""Rows of a tile. With fewer rows or outputs of gate, a tile would be larger than the operands."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is divided; `heuristic` picks one."""

    outputs: int
    """Outputs of a tile, of gate and of up each: a multiple of 16, at most 128."""
    cluster: int
    """CTAs that use the same weights: 1 or 2."""
    band: int = 16
    """Row tiles of a CTA that are processed together before the next ones."""
    num_blocks: int = NUM_SMS
    """Number of CTAs."""


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
    problem = Problem(
        outputs=config.outputs,
        cluster=config.cluster,
        band=max(1, config.band // config.cluster),
        piece=math.gcd(config.outputs, COLUMNS),
        num_rows=num_rows,
        num_outputs=num_outputs,
        depth=depth,
        num_groups=config.num_blocks // config.cluster,
        activation=activation,
        interpret=interpret,
    )

    def array(*shape, has_tiles: bool):
        # Any: pyright takes them for abstract classes.
        tiling = cast(Any, plgpu.TilingTransform)((8, shape[-1]))
        swizzle = cast(Any, plgpu.SwizzleTransform)(2 * shape[-1])
        return plgpu.SMEM(shape, x.dtype, transforms=(tiling, swizzle) if has_tiles else (swizzle,))

    def views(*shape):
        return plgpu.RefUnion(array(*shape, has_tiles=True), array(*shape, has_tiles=False))

    def body(x, weight, y, rows, weights, results, full, free):
        (x_smem, x_boxes), (out_smem, out_boxes) = rows, results
        if interpret:  # in which views do not alias
            x_boxes, out_boxes = x_smem, out_smem
        kernel(problem, Global(x, weight, y), Shared(x_smem, x_boxes, weights, out_smem, out_boxes, full, free))

    return plgpu.kernel(
        body,
        kernel_name="gated_linear_unit",
        out_type=jax.ShapeDtypeStruct((num_rows, num_outputs), x.dtype),
        scratch_types=(
            views(STAGES, UNITS, ROWS, COLUMNS),
            array(STAGES, 2 * problem.outputs, COLUMNS, has_tiles=True),
            views(UNITS, problem.pieces, ROWS, problem.piece),
            plgpu.Barrier(num_barriers=STAGES, num_arrivals=UNITS + 2),
            plgpu.ClusterBarrier(collective_axes=("rank",), num_barriers=STAGES, num_arrivals=UNITS),
        ),
        grid=(problem.num_groups,),
        grid_names=("group",),
        cluster=(problem.cluster,),
        cluster_names=("rank",),
        num_threads=UNITS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # nothing is reduced
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(x, weight)
