"""The wide kernel for Hopper (sm_90a), in Mosaic GPU: a matmul of codes whose groups have many rows, bound by the
tensor cores.

Codes are operand A of wgmma, converted to bfloat16 in registers while products of the columns before are computed;
rows are operand B. A dense matrix is the weight of a single group. If that has few tiles, K is cut into parts, whose
sums XLA adds up.
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

from pallas_kernels.device.codes import MULTIPLIERS, codes_per_byte
from pallas_kernels.device.product_of_codes import BYTES, OUTPUTS, PIECE, SMALLEST_GROUP
from pallas_kernels.device.swizzled import tiled, views
from pallas_kernels.grouped_codes import wide_device
from pallas_kernels.grouped_codes.wide_kernel import (
    STAGED_PITCH,
    STAGED_ROWS,
    UNITS,
    Global,
    Problem,
    Shared,
    kernel,
)
from pallas_kernels.grouped_matmul import Plan, plan
from pallas_kernels.hopper import BY_LANES, NUM_SMS, SHARED_MEMORY
from pallas_kernels.quantized_matmuls import QuantizedMatrix

MAX_X_SLOTS = 12
MAX_PARTS = 8
TWO_BLOCKS = 128
"""Most rows of a tile with two blocks of 64 outputs a warpgroup, which there are registers for."""
MAX_ROWS_IN_LEVELS = 512
"""Most rows that were timed with minimums or scales in two levels: faster than floats that XLA makes of codes, by less
the more rows there are. Tables, which take some more operations, have not been timed.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is divided; `heuristic` picks one."""

    rows: int
    """Rows of a tile, a multiple of 8 up to 256."""
    blocks: int
    """Blocks of 64 outputs of a warpgroup: 1 or 2, and at most 256 / `rows`."""
    parts: int = 1
    """Parts that K is cut into."""
    num_blocks: int = NUM_SMS
    """Number of thread blocks."""


def heuristic(num_rows: int, weight: QuantizedMatrix, *, rows: int) -> Config:
    """Return the division that takes the least time for tiles of `rows` rows, from times of an H100, see NOTES.md."""
    num_groups, *halves, num_outputs, depth = weight.shape
    blocks = 2 if rows <= TWO_BLOCKS else 1
    if num_groups > 1:
        return Config(rows=rows, blocks=blocks)
    num_outputs *= 1 + len(halves)
    tiles = -(-num_rows // rows) * -(-num_outputs // (UNITS * blocks * OUTPUTS))
    block_k = BYTES * codes_per_byte(weight.code)
    steps = -(-depth // block_k)
    of_piece = 900 if blocks == 2 else 260 + 2 * rows

    def nanoseconds(parts: int) -> float:
        """Return about how long all rounds of items take, and to add up the parts' sums."""
        of_item = -(-steps // parts) * (block_k // PIECE) * of_piece + 2000
        of_sums = 0 if parts == 1 else 3000 + parts * num_rows * num_outputs * 8 / 3000
        return -(-tiles * parts // NUM_SMS) * of_item + of_sums

    return Config(rows=rows, blocks=blocks, parts=min(range(1, 1 + min(MAX_PARTS, steps)), key=nanoseconds))


def why_slower(x: Any, weight: QuantizedMatrix) -> str | None:
    """Return why the kernel is slower than XLA for such rows and a dense matrix, or None if it is not known to be.

    XLA multiplies by experts one after the other, which is slower in any case.
    """
    has_levels = weight.minimums is not None or not _is_in_one_level(weight)
    if x.shape[0] > MAX_ROWS_IN_LEVELS and weight.shape[0] == 1 and has_levels:
        return (
            f"at most {MAX_ROWS_IN_LEVELS} rows with tables, minimums, scales in two levels or of {SMALLEST_GROUP} "
            f"columns, got {x.shape[0]}"
        )
    return None


def in_one_level(weight: QuantizedMatrix) -> tuple[QuantizedMatrix, Float[Array, "..."] | None]:
    """Return the weight with scales as the kernel takes them, and the factors of its sums, [*outputs, 1], or None.

    One factor of all columns multiplies the sums, as scales of 8 bits are exact in bfloat16. Products of scales and
    factors of several groups are rounded to bfloat16, which the kernel does to scales of groups anyway. Four scales a
    piece have to be of 16 bits.
    """
    if _is_in_one_level(weight):
        return weight, None
    group, factors = weight.group_size, weight.factors
    of_groups = jnp.float32 if group == weight.shape[-1] else jnp.bfloat16
    if weight.code in MULTIPLIERS:
        return _with(weight, of_groups, weight.scales.astype(jnp.float32) / MULTIPLIERS[weight.code], None, None), None
    if factors is None:
        return _with(weight, of_groups, *(weight.scales, weight.zeros, weight.minimums)), None
    if factors.shape[-1] == 1 and weight.minimums is None and group != weight.shape[-1]:
        return _with(weight, of_groups, weight.scales, weight.zeros, None), factors.astype(jnp.float32)
    minimums = weight.minimums
    if minimums is not None and weight.minimum_factors is not None:
        minimums = _product(minimums, weight.minimum_factors)
    return _with(weight, of_groups, _product(weight.scales, factors), weight.zeros, minimums), None


def _is_in_one_level(weight: QuantizedMatrix) -> bool:
    """Return true if the kernel takes the scales as they are."""
    is_small = weight.scales.dtype in (jnp.int8, jnp.float8_e4m3fn)
    is_plain = weight.factors is None and weight.code not in MULTIPLIERS
    return is_plain and not is_small and weight.group_size > SMALLEST_GROUP


def _with(
    weight: QuantizedMatrix, dtype: Any, scales: Array, zeros: Array | None, minimums: Array | None
) -> QuantizedMatrix:
    """Return a weight of one level with the codes of another."""

    def of_one_level(values: Array | None) -> Array | None:
        return None if values is None else values.astype(jnp.float32).astype(dtype)

    return QuantizedMatrix(
        codes=weight.codes,
        scales=scales.astype(jnp.float32).astype(dtype),
        zeros=of_one_level(zeros),
        minimums=of_one_level(minimums),
        code=weight.code,
    )


def _product(small: Array, factors: Array) -> Float[Array, "..."]:
    """Return scales or minimums of groups times the factors of larger groups, in float32."""
    values = small.astype(jnp.float32).reshape(*factors.shape, -1)
    return (values * factors.astype(jnp.float32)[..., None]).reshape(small.shape)


def wide_sm90(
    x: Float[Array, "M K"],
    weight: QuantizedMatrix,
    group_sizes: Int[Array, " X"],
    *,
    bias: Float[Array, "X *halves N"] | None = None,
    activation: Callable[[Array, Array], Array] | None = None,
    tiles: Plan | None = None,
    output_dtype: Any = None,
    config: Config,
    ops: Any = wide_device,
) -> Float[Array, "M N"]:
    """Run the kernel, see `grouped_matmul_of_codes`. `ops` replaces what the interpreter lacks."""
    weight, factors = in_one_level(weight)
    num_groups, *halves, num_outputs, depth = weight.shape
    num_rows, output_dtype = len(x), jnp.dtype(output_dtype or x.dtype)
    if config.parts > 1 and halves:  # XLA finishes them
        num_outputs, halves = 2 * num_outputs, []
    kernel_activation = activation if config.parts == 1 else None
    problem = Problem(
        code=weight.code,
        rows=config.rows,
        blocks=config.blocks,
        parts=config.parts,
        halves=1 + len(halves),
        depth=depth,
        num_outputs=num_outputs,
        num_scales=weight.scales.shape[-1],
        w_slots=2 if codes_per_byte(weight.code) == 2 else 3,
        x_slots=0,
        num_blocks=config.num_blocks,
        activation=kernel_activation,
        ops=ops,
    )
    used = problem.w_slots * problem.ring_outputs * BYTES + UNITS * STAGED_ROWS * STAGED_PITCH * 2
    problem = problem._replace(x_slots=min(MAX_X_SLOTS, (SHARED_MEMORY - 1024 - used) // (config.rows * PIECE * 2)))
    if tiles is None:
        tiles = plan(group_sizes, num_rows=num_rows, tile_rows=config.rows)

    def by_output(values: Array | None) -> Array | None:
        return (
            None
            if values is None
            else values.reshape(num_groups * len(halves or [0]) * problem.halves * num_outputs, -1)
        )

    scales = by_output(weight.scales)
    assert scales is not None
    if scales.dtype == jnp.float8_e8m0fnu:
        scales = lax.bitcast_convert_type(scales, jnp.int8)
    padded = jnp.pad(x, ((0, max(0, config.rows - num_rows)), (0, 0)))  # a box of rows is no larger than the array
    gmem = Global(
        tiles,
        x=padded,
        weight=lax.bitcast_convert_type(weight.codes, jnp.int8).reshape(-1, num_outputs, weight.codes.shape[-1]),
        scales=scales,
        zeros=by_output(weight.zeros),
        minimums=by_output(weight.minimums),
        factors=by_output(factors),
        bias=by_output(bias) if config.parts == 1 else None,
        y=None,
    )
    y = _call(gmem, problem=problem, output_dtype=output_dtype if config.parts == 1 else jnp.dtype(jnp.float32))
    if config.parts == 1:
        return y[:num_rows]
    y = jnp.sum(y.reshape(config.parts, len(padded), -1)[:, :num_rows], axis=0)
    if bias is not None:
        y = y + bias.reshape(1, -1).astype(jnp.float32)
    if activation is not None:
        y = activation(*jnp.split(y, 2, axis=1))
    return y.astype(output_dtype)


# Jitted, so that the layers of a model use one trace and one compilation.
@functools.partial(jax.jit, static_argnames=("problem", "output_dtype"))
def _call(gmem: Global, *, problem: Problem, output_dtype: Any) -> Float[Array, "L N"]:
    inputs, structure = jax.tree.flatten(gmem)
    x = gmem.x
    is_staged = output_dtype == jnp.bfloat16
    weights = (problem.w_slots, problem.ring_outputs, BYTES)
    staged_shape = (UNITS, STAGED_ROWS, STAGED_PITCH) if is_staged else (8,)

    def body(*refs):
        *refs, y, weights, (x_tiled, x_boxes), staged, w_full, w_free, x_full, x_free = refs
        if problem.ops is not wide_device:  # where views do not alias
            x_tiled = x_boxes
        gmem = structure.unflatten(refs)._replace(y=y)
        shared = Shared(weights, x_tiled, x_boxes, staged if is_staged else None, w_full, w_free, x_full, x_free)
        kernel(problem, gmem, shared)

    return plgpu.kernel(
        body,
        kernel_name="wide_grouped_codes",
        out_type=jax.ShapeDtypeStruct((problem.parts * x.shape[0], problem.num_outputs), output_dtype),
        scratch_types=(
            plgpu.SMEM(weights, jnp.int8, transforms=tiled(BYTES, itemsize=1)[1:]),
            views(problem.x_slots, problem.rows, PIECE, dtype=x.dtype),
            plgpu.SMEM(staged_shape, jnp.bfloat16),
            plgpu.Barrier(num_barriers=problem.w_slots, num_arrivals=problem.halves),
            plgpu.Barrier(num_barriers=problem.w_slots, num_arrivals=UNITS),
            plgpu.Barrier(num_barriers=problem.x_slots),
            plgpu.Barrier(num_barriers=problem.x_slots, num_arrivals=UNITS),
        ),
        grid=(problem.num_blocks,),
        grid_names=("block",),
        num_threads=UNITS + 1,
        thread_name="wg",
        compiler_params=BY_LANES,
    )(*inputs)
