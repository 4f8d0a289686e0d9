"""`grouped_matmul` of codes for Hopper (sm_90a), in Mosaic GPU: only the codes of groups with rows are read.

As in `quantized_matmuls` codes are operand A of wgmma, converted to bfloat16 in registers, and rows operand B. With few
rows there are few tiles: warpgroups then have the same outputs and parts of K, so that more thread blocks have one.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device.codes import MULTIPLIERS, TABLES, codes_per_byte
from pallas_kernels.device.product_of_codes import BYTES, OUTPUTS, PIECE, SMALLEST_GROUP
from pallas_kernels.device.swizzled import tiled, views
from pallas_kernels.grouped_codes import device
from pallas_kernels.grouped_codes.kernel import CHUNK, NUM_COMPUTE, RING_ROWS, Global, Problem, Shared, kernel
from pallas_kernels.grouped_matmul import Plan, num_used, plan
from pallas_kernels.hopper import BY_LANES, NUM_SMS, SHARED_MEMORY, balance
from pallas_kernels.quantized_matmuls import QuantizedMatrix, scaling_of, vectors_of_outputs, why_not_factors

SIZES = (8, 16, 32)
"""Rows that a tile may have; those of the wide kernel have more."""
WIDE_SIZES = (48, 64, 96, 128, 160, 192, 256)
SPARE = 1.5
"""Rows of a tile over those that a group has on average, at least."""
ROW_BYTES = 32 * 1024
"""Most bytes of the rows of a step."""
X_SLOTS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is divided; `heuristic` picks one."""

    rows: int
    """Rows of a tile."""
    across: int
    """Warpgroups that have outputs of their own: 1, 2 or 4."""
    num_blocks: int = NUM_SMS
    """Number of thread blocks."""


def tile_rows(num_rows: int, num_groups: int) -> int:
    """Return the rows of the kernels' tiles: most groups then have one tile, as long as that is possible."""
    if num_groups == 1:
        of_each = -(-num_rows // max(1, -(-num_rows // WIDE_SIZES[-1])))  # tiles are alike
        return next((size for size in SIZES if size >= of_each), -(-of_each // CHUNK) * CHUNK)
    mean = num_rows / max(num_used(num_rows, num_groups), 1)
    return next((size for size in SIZES + WIDE_SIZES if size >= int(SPARE * mean)), WIDE_SIZES[-1])


def heuristic(num_rows: int, weight: QuantizedMatrix) -> Config:
    """Return the widest tiles of outputs that keep the multiprocessors reading. From arithmetic, see NOTES.md."""
    num_groups, *halves, num_outputs, _ = weight.shape
    rows = min(tile_rows(num_rows, num_groups), SIZES[-1])
    tiles = max(num_used(num_rows, num_groups), num_rows / rows)

    def items(across: int) -> float:
        return tiles * -(-num_outputs * (1 + len(halves)) // (OUTPUTS * across))

    def fits(across: int) -> bool:
        block_k = BYTES * codes_per_byte(weight.code)
        return across == NUM_COMPUTE or rows * block_k * NUM_COMPUTE // across * 2 <= ROW_BYTES

    across = max(filter(fits, (1, 2, 4)), key=lambda across: (balance(items(across)), across))
    return Config(rows=rows, across=across)


def why_not(x: Any, weight: QuantizedMatrix) -> str | None:
    """Return why neither this kernel nor the wide one multiplies such rows by such weights, [X, N, K] or [X, 2, N, K],
    or None if both do.
    """
    if x.dtype != jnp.bfloat16:
        return f"rows of bfloat16, got {x.dtype}"
    depth, outputs, group = weight.shape[-1], weight.shape[-2], weight.group_size
    block = BYTES * codes_per_byte(weight.code)
    if depth % (block // 8) or outputs % CHUNK or outputs < OUTPUTS:
        return (
            f"K in multiples of {block // 8} and outputs in multiples of {CHUNK}, at least {OUTPUTS}, "
            f"got a weight of shape {weight.shape}"
        )
    if group != depth and (group % SMALLEST_GROUP or block % group):
        return f"scales of all columns, or of {SMALLEST_GROUP} to {block} that are a power of two, got {group}"
    if group == SMALLEST_GROUP and depth % (2 * group):
        return f"K in multiples of {2 * group} with scales of {group}, got {depth}"
    if reason := why_not_factors(weight, block):
        return reason
    if weight.factors is not None and weight.code in MULTIPLIERS:
        return f"scales in one level of {weight.code}"
    if weight.minimums is not None and weight.code in TABLES:
        return f"minimums of integers, got {weight.code}"
    if weight.zeros is not None and weight.code != "uint4":
        return f"zero points of uint4, and of no other codes, got {weight.code}"
    if group == depth and (weight.zeros is not None or weight.minimums is not None):
        return f"zero points and minimums of groups of columns, got those of all {group}"
    if weight.zeros is None and weight.minimums is None and weight.code == "uint4":
        return "uint4 with zero points or minimums"
    return None


def grouped_codes_sm90(
    x: Float[Array, "M K"],
    weight: QuantizedMatrix,
    group_sizes: Int[Array, " X"],
    *,
    bias: Float[Array, "X *halves N"] | None = None,
    activation: Callable[[Array, Array], Array] | None = None,
    tiles: Plan | None = None,
    output_dtype: Any = None,
    config: Config | None = None,
    ops: Any = device,
) -> Float[Array, "M N"]:
    """Run the kernel, see `grouped_matmul_of_codes`. `ops` replaces what the interpreter lacks."""
    num_groups, *halves, num_outputs, _ = weight.shape
    num_rows, scaling = len(x), scaling_of(weight, "w")
    if num_rows == 0:
        return jnp.zeros((0, num_outputs), output_dtype or x.dtype)
    config = config or heuristic(num_rows, weight)
    matrices = num_groups * (1 + len(halves))
    empty = Problem(
        scaling=scaling,
        rows=config.rows,
        across=config.across,
        halves=1 + len(halves),
        num_outputs=num_outputs,
        w_slots=0,
        x_slots=X_SLOTS,
        num_blocks=config.num_blocks,
        activation=activation,
        ops=ops,
    )
    used = (X_SLOTS * empty.pieces * PIECE * 2 + empty.num_parts * OUTPUTS * 4) * config.rows
    problem = empty._replace(w_slots=min(6, (SHARED_MEMORY - 1024 - used) // (RING_ROWS * BYTES)))
    if tiles is None:
        tiles = plan(group_sizes, num_rows=num_rows, tile_rows=config.rows)

    gmem = Global(
        tiles,
        x=x,
        weight=lax.bitcast_convert_type(weight.codes, jnp.int8).reshape(matrices, num_outputs, -1),
        vectors=vectors_of_outputs(weight, scaling),
        bias=None if bias is None else bias.reshape(matrices * num_outputs, 1),
        y=None,
    )
    return _call(gmem, problem=problem, output_dtype=jnp.dtype(output_dtype or x.dtype))


# Jitted, so that the layers of a model use one trace and one compilation.
@functools.partial(jax.jit, static_argnames=("problem", "output_dtype"))
def _call(gmem: Global, *, problem: Problem, output_dtype: Any) -> Float[Array, "M N"]:
    inputs, structure = jax.tree.flatten(gmem)
    x = gmem.x

    def body(*refs):
        refs, y, (w_tiled, w_boxes), *others = refs[: len(inputs)], *refs[len(inputs) :]
        if problem.ops is not device:  # where views do not alias
            w_tiled = w_boxes
        gmem = structure.unflatten(refs)._replace(y=y)
        kernel(problem, gmem, Shared(w_tiled, w_boxes, *others))

    x_slots, w_slots = problem.x_slots, problem.w_slots
    return plgpu.kernel(
        body,
        kernel_name="grouped_codes",
        out_type=jax.ShapeDtypeStruct((x.shape[0], problem.num_outputs), output_dtype),
        scratch_types=(
            views(w_slots, RING_ROWS, BYTES, dtype=jnp.int8),
            plgpu.SMEM((x_slots * problem.pieces, problem.rows, PIECE), x.dtype, transforms=tiled(PIECE)),
            plgpu.SMEM((problem.num_parts, problem.rows // CHUNK, 128, 4) if problem.num_parts else (1,), jnp.float32),
            plgpu.Barrier(num_barriers=w_slots, num_arrivals=problem.halves * problem.deep),
            plgpu.Barrier(num_barriers=w_slots, num_arrivals=NUM_COMPUTE),
            plgpu.Barrier(num_barriers=x_slots),
            plgpu.Barrier(num_barriers=x_slots, num_arrivals=NUM_COMPUTE),
            plgpu.Barrier(num_arrivals=max(1, problem.num_parts)),
            plgpu.Barrier(num_arrivals=problem.across),
        ),
        grid=(problem.num_blocks,),
        grid_names=("block",),
        num_threads=NUM_COMPUTE + 2,
        thread_name="wg",
        compiler_params=BY_LANES,
    )(*inputs)
