"""The large matmul for Hopper (sm_90a), in Mosaic GPU: many rows at the speed of the tensor cores.

Persistent thread blocks take one tile after the other. Rows are operand A of wgmma and weights, which lie [outputs, K]
as in a checkpoint, operand B. One warpgroup streams both through a ring in shared memory and goes on with the next tile
while the two that multiply store this one. The thread blocks of a cluster have rows of their own and share the weights:
each fetches a part and TMA writes it to all. With gate and up a tile has the same outputs of both.
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

from pallas_kernels.hopper import NUM_SMS, SHARED_MEMORY
from pallas_kernels.large_matmul.sm90_kernel import COLUMNS, ROWS, UNITS, Global, Problem, Shared, kernel

MAX_TILE = 256  # weight rows of one wgmma
MAX_SUMS = 128  # float32 registers of a thread


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is cut; `heuristic` picks one."""

    rows: int
    """Of a tile: 128 or 256."""
    outputs: int
    """Of a tile: a multiple of 16. With gate and up, of each of them."""
    stages: int
    """Steps of 64 of K in the ring."""
    cluster: int = 1
    """Thread blocks that share weights: 1 or 2."""
    band: int = 16
    """Tiles of rows that are taken together before the next ones, counted as a thread block has them."""
    lead: int = 0
    """Steps that the first computing warpgroup is ahead of the second, at least, where an item begins."""
    num_blocks: int = NUM_SMS
    """Thread blocks."""

    @property
    def piece(self) -> int:
        """Columns that are stored at a time."""
        return math.gcd(self.outputs, COLUMNS)

    def slots(self, *, is_gated: bool) -> int:
        """Pieces of a warpgroup's result for which the ring leaves room: all, or a divisor of that."""
        pieces = self.rows // UNITS // ROWS * (self.outputs // self.piece)
        room = (SHARED_MEMORY - self._ring(is_gated=is_gated)) // (UNITS * ROWS * self.piece * 2)
        return max((n for n in range(1, pieces + 1) if pieces % n == 0 and n <= room), default=0)

    def shared_memory(self, *, is_gated: bool) -> int:
        """Bytes of a thread block."""
        slots = max(1, self.slots(is_gated=is_gated))
        return self._ring(is_gated=is_gated) + UNITS * slots * ROWS * self.piece * 2

    def _ring(self, *, is_gated: bool) -> int:
        return self.stages * (self.rows + self.outputs * (1 + is_gated)) * COLUMNS * 2


def check_supported(x: Float[Array, "M K"], weight: Float[Array, "*halves N K"]) -> None:
    """Raises NotImplementedError with the reason if the kernel cannot do it."""
    if x.dtype != weight.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"the large matmul takes bfloat16 or float16, got x of {x.dtype} and a weight of {weight.dtype}"
        )
    if x.shape[0] < ROWS:
        raise NotImplementedError(f"the large matmul takes at least {ROWS} rows, got {x.shape[0]}")
    if x.shape[1] % COLUMNS or weight.shape[-2] % 8 or weight.shape[-2] < ROWS:
        raise NotImplementedError(
            "the large matmul takes K in multiples of 64 and outputs in multiples of 8, at least 64, got a weight of "
            f"shape {weight.shape}"
        )


def heuristic(num_rows: int, num_outputs: int, *, is_gated: bool) -> Config:
    """The tiles that take the fewest cycles, by an estimate: see NOTES.md."""
    halves = 1 + is_gated
    configs = [
        _with_ring(rows=rows, outputs=outputs, cluster=cluster, is_gated=is_gated)
        for rows, cluster in ((128, 2), (128, 1), (256, 1))
        for outputs in range(32 // halves, min(MAX_TILE, MAX_SUMS * 256 // rows) // halves + 1, 16 // halves)
        if outputs % 16 == 0
    ]

    def cycles(config: Config) -> float:
        """Of all rounds of tiles, for a step of K."""
        wide = config.outputs * halves
        row_tiles = -(-num_rows // (config.rows * config.cluster))
        rounds = -(-row_tiles * -(-num_outputs // config.outputs) // (NUM_SMS // config.cluster))
        multiplied = config.rows * wide * COLUMNS / 2048
        copied = (config.rows + wide / config.cluster) * COLUMNS * 2 / 40
        return rounds * max(multiplied, copied)

    return min(configs, key=lambda config: (cycles(config), -config.outputs))


def _with_ring(*, rows: int, outputs: int, cluster: int, is_gated: bool) -> Config:
    step = (rows + outputs * (1 + is_gated)) * COLUMNS * 2
    stages = min(8, (SHARED_MEMORY - 2**15) // step)
    return Config(rows=rows, outputs=outputs, stages=stages, cluster=cluster, band=16 * 128 // rows)


# Jitted: the layers of a model share one trace and one compilation.
@functools.partial(jax.jit, static_argnames=("activation", "config", "interpret"))
def large_matmul_sm90(
    x: Float[Array, "M K"],
    weight: Float[Array, "*halves N K"],
    *,
    activation: Callable[[Array], Array] | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    """See `large_matmul`. Raises NotImplementedError for what the kernel cannot do.

    `interpret` swaps in what the interpreter of `plgpu.force_gpu_interpret_mode` lacks.
    """
    check_supported(x, weight)
    (num_rows, depth), num_outputs = x.shape, weight.shape[-2]
    is_gated = activation is not None
    config = config or heuristic(num_rows, num_outputs, is_gated=is_gated)
    problem = Problem(
        rows=config.rows,
        outputs=config.outputs,
        halves=1 + is_gated,
        stages=config.stages,
        cluster=config.cluster,
        band=max(1, config.band // config.cluster),
        # Few steps could all be copied before the second warpgroup has begun.
        lead=config.lead if depth // COLUMNS > config.stages else 0,
        piece=config.piece,
        slots=config.slots(is_gated=is_gated),
        num_rows=num_rows,
        num_outputs=num_outputs,
        depth=depth,
        num_groups=config.num_blocks // config.cluster,
        activation=activation,
        interpret=interpret,
    )
    if problem.slots == 0:
        raise ValueError(f"{config} does not fit into shared memory")
    return _call(x, weight.reshape(problem.halves, num_outputs, depth), problem)


def _call(x: Float[Array, "M K"], weight: Float[Array, "halves N K"], problem: Problem) -> Float[Array, "M N"]:
    def array(*shape, has_tiles: bool):
        # Any: pyright takes them for abstract classes.
        tiling = cast(Any, plgpu.TilingTransform)((8, shape[-1]))
        swizzle = cast(Any, plgpu.SwizzleTransform)(2 * shape[-1])
        return plgpu.SMEM(shape, x.dtype, transforms=(tiling, swizzle) if has_tiles else (swizzle,))

    def views(*shape):
        return plgpu.RefUnion(array(*shape, has_tiles=True), array(*shape, has_tiles=False))

    def body(*refs):
        x, weight, y, (x_smem, x_boxes), ring, (out_smem, out_boxes), *barriers = refs
        if problem.interpret:  # where each view has bytes of its own
            x_boxes, out_boxes = x_smem, out_smem
        full, free, *started = barriers
        shared = Shared(x_smem, x_boxes, ring, out_smem, out_boxes, full, free, started[0] if started else None)
        kernel(problem, Global(x, weight, y), shared)

    return plgpu.kernel(
        body,
        kernel_name="large_matmul",
        out_type=jax.ShapeDtypeStruct((problem.num_rows, problem.num_outputs), x.dtype),
        scratch_types=(
            views(problem.stages, UNITS, problem.unit_rows, COLUMNS),
            array(problem.stages, problem.halves * problem.outputs, COLUMNS, has_tiles=True),
            views(UNITS, problem.slots, ROWS, problem.piece),
            plgpu.Barrier(num_barriers=problem.stages, num_arrivals=UNITS + problem.halves),
            plgpu.ClusterBarrier(collective_axes=("rank",), num_barriers=problem.stages, num_arrivals=UNITS),
            *([plgpu.Barrier()] if problem.lead else []),
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
