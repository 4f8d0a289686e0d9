"""`grouped_matmul` for Hopper (sm_90a), in Mosaic GPU: only the weights of groups with rows are read, and once.

Persistent CTAs process the tiles of a plan that is made from the group sizes on the device. Rows are operand A of wgmma
and weights operand B, as in `small_matmul`. A tile begins at its group's first row: an aligned one would almost always
straddle two groups. So a group of up to 64 rows (few rows: bound by HBM) or 128 (many: bound by the tensor cores) is
one tile, and at its end a copy of fewer rows, rather than a mask, keeps the next group's rows intact.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device.swizzled import tiled, views
from pallas_kernels.grouped_matmul.sm90_kernel import COLUMNS, Global, Problem, Shared, kernel
from pallas_kernels.grouped_matmul.tiles import ROWS, Plan, num_used, plan, tile_rows
from pallas_kernels.hopper import BY_LANES, NUM_SMS, SHARED_MEMORY, balance

MAX_TILE = 256  # weight rows of one wgmma


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is divided; `heuristic` picks one."""

    rows: int
    """Rows of a tile: 64, or 128 for two computing warpgroups."""
    outputs: int
    """Outputs of a tile, of gate and up each: a multiple of 64."""
    block_k: int
    """Columns of K per step of the ring: a multiple of 64."""
    stages: int
    """Steps in the ring."""
    num_blocks: int = NUM_SMS
    """Number of CTAs."""

    def shared_memory(self, *, is_gated: bool) -> int:
        """Return the shared memory of a CTA in bytes."""
        step = (self.rows + self.outputs * (1 + is_gated)) * self.block_k * 2
        return self.stages * step + self.rows * self.outputs * 2


def check_supported(x: Float[Array, "M K"], weight: Float[Array, "X *halves N K"]) -> None:
    """Raise NotImplementedError with the reason if the kernel does not support these operands."""
    if x.dtype != weight.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"the grouped matmul takes bfloat16 or float16, got x of {x.dtype} and a weight of {weight.dtype}"
        )
    if x.shape[1] % 64 or weight.shape[-2] % 8 or weight.shape[-2] < COLUMNS:
        raise NotImplementedError(
            "the grouped matmul takes K in multiples of 64 and outputs in multiples of 8, at least 64, got a weight of "
            f"shape {weight.shape}"
        )


def heuristic(num_rows: int, weight_shape: tuple[int, ...], *, is_gated: bool) -> Config:
    """Wide tiles for many rows; for few the widest that keep all SMs reading. From arithmetic, see NOTES.md."""
    num_groups, num_outputs, depth = weight_shape[0], *weight_shape[-2:]
    widest = min(MAX_TILE // (1 + is_gated), num_outputs // COLUMNS * COLUMNS)
    rows = tile_rows(num_rows, num_groups)
    if rows > ROWS:
        return _with_ring(rows=rows, outputs=widest, depth=depth, is_gated=is_gated)
    used = num_used(num_rows, num_groups)
    widths = range(COLUMNS, widest + 1, COLUMNS)
    outputs = max(widths, key=lambda width: (balance(used * -(-num_outputs // width)), width))
    return _with_ring(rows=rows, outputs=outputs, depth=depth, is_gated=is_gated)


def _with_ring(*, rows: int, outputs: int, depth: int, is_gated: bool) -> Config:
    """Return a configuration with the longest steps of which four fit: fewer barriers, and longer runs of memory."""
    for block_k in (256, 128, 64):
        empty = Config(rows=rows, outputs=outputs, block_k=block_k, stages=0)
        one = dataclasses.replace(empty, stages=1)
        used, with_one = (config.shared_memory(is_gated=is_gated) for config in (empty, one))
        stages = (SHARED_MEMORY - used) // (with_one - used)
        if stages >= 4 and depth % block_k == 0:
            break
    return dataclasses.replace(empty, stages=min(stages, 12))


def grouped_matmul_sm90(
    x: Float[Array, "M K"],
    weight: Float[Array, "X *halves N K"],
    group_sizes: Int[Array, " X"],
    *,
    bias: Float[Array, "X *halves N"] | None = None,
    activation: Callable[[Array, Array], Array] | None = None,
    tiles: Plan | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    """Run the kernel, see `grouped_matmul`. Raises NotImplementedError for what it does not support.

    `interpret` replaces what the interpreter of `plgpu.force_gpu_interpret_mode` lacks.
    """
    check_supported(x, weight)
    num_rows, depth = x.shape
    if num_rows == 0:
        return jnp.zeros((0, weight.shape[-2]), x.dtype)
    is_gated = activation is not None
    config = config or heuristic(num_rows, weight.shape, is_gated=is_gated)
    # A copy takes a power of two of rows, and at least 8.
    padded = num_rows if num_rows >= ROWS else max(8, 1 << (num_rows - 1).bit_length())
    problem = Problem(
        outputs=config.outputs,
        halves=1 + is_gated,
        block_k=config.block_k,
        stages=config.stages,
        units=config.rows // ROWS,
        depth=depth,
        num_outputs=weight.shape[-2],
        boxes=tuple(box for box in (8, 16, 32, ROWS) if box <= padded),
        num_blocks=config.num_blocks,
        activation=activation,
        interpret=interpret,
    )
    if tiles is None:
        tiles = plan(group_sizes, num_rows=num_rows, tile_rows=config.rows)
    if bias is not None:
        missing = problem.output_tiles * problem.outputs - problem.num_outputs
        bias = jnp.pad(bias.reshape(-1, problem.num_outputs), ((0, 0), (0, missing)))
    x, weight = jnp.pad(x, ((0, padded - num_rows), (0, 0))), weight.reshape(-1, problem.num_outputs, depth)
    return _call(Global(tiles, x, weight, bias, None), problem=problem)[:num_rows]


# Jitted, so that the layers of a model use one trace and one compilation.
@functools.partial(jax.jit, static_argnames="problem")
def _call(gmem: Global, *, problem: Problem) -> Float[Array, "M N"]:
    inputs, structure = jax.tree.flatten(gmem)
    x, units, outputs = gmem.x, problem.units, problem.outputs
    weights = (problem.stages, problem.halves * outputs, problem.block_k)

    def body(*refs):
        *refs, y, (x_smem, x_boxes), ring, (out_smem, out_boxes), full, free = refs
        if problem.interpret:  # in which views do not alias
            x_boxes, out_boxes = x_smem, out_smem
        gmem = structure.unflatten(refs)._replace(y=y)
        kernel(problem, gmem, Shared(x_smem, x_boxes, ring, out_smem, out_boxes, full, free))

    return plgpu.kernel(
        body,
        kernel_name="grouped_matmul",
        out_type=jax.ShapeDtypeStruct((x.shape[0], problem.num_outputs), x.dtype),
        scratch_types=(
            views(problem.stages, units, problem.parts, ROWS, COLUMNS, dtype=x.dtype),
            plgpu.SMEM(weights, x.dtype, transforms=tiled(COLUMNS)),
            views(units, outputs // COLUMNS, ROWS, COLUMNS, dtype=x.dtype),
            plgpu.Barrier(num_barriers=problem.stages, num_arrivals=problem.halves + units * problem.parts),
            plgpu.Barrier(num_barriers=problem.stages, num_arrivals=units),
        ),
        grid=(problem.num_blocks,),
        grid_names=("block",),
        num_threads=units + 1,
        thread_name="wg",
        compiler_params=BY_LANES,
    )(*inputs)
