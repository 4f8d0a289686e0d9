"""Per-thread operations of the routing kernel, below the level of Pallas: loads and stores at an index per thread, and
reductions over the threads of a warp.

A value per thread of a warpgroup is an array of 128. Each operation exists twice: in MLIR for the GPU, and in jax.numpy
for the interpreter on a CPU, which lacks `inline_mgpu` and, here, clusters.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.mlir import REF, as_index, const_i32, const_index, inline, value_of, vector_of
from pallas_kernels.jax_internals import arith, gpu, ir, memref, nvvm, vector

THREADS = 128  # of a warpgroup
LANES = 32  # of a warp
LAYOUT = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)


class ThreadOps(NamedTuple):
    """Arrays have an entry a thread, refs one axis; indices must be within it, also where the mask is false."""

    thread: Callable[[], Any]
    """() -> 0 .. 127."""

    gather: Callable[..., Any]
    """(ref, index) -> ref[index]."""

    scatter: Callable[..., None]
    """(ref, index, value, mask): ref[index] = value where the mask is true, at indices that differ."""

    clear: Callable[[Any], None]
    """(ref): 0 everywhere, by a warpgroup of which each warp clears a part: the first the first quarter, and so on."""

    scatter_to_parts: Callable[..., None]
    """(ref, index, value, num_parts): scatter without a mask, to the shared memory of each CTA of the cluster."""

    warp_max: Callable[[Any], Any]
    """Maximum of int32 values over the warp, the same for all its threads."""

    warp_min: Callable[[Any], Any]
    """Minimum of int32 values over the warp, the same for all its threads."""

    warp_sum: Callable[[Any], Any]
    """Sum of float32 values over the warp, the same for all its threads."""

    running_sum: Callable[[Any], Any]
    """Inclusive running sum of int32 values over the threads of a warp."""

    sync_warp: Callable[[], None]
    """Wait for the warp's threads; then all see what each has stored."""

    sync_block: Callable[[Any], None]
    """(barrier): synchronize all threads of the CTA. Only the interpreter uses the barrier."""

    arrive_cluster: Callable[[], None]
    """Signal to the cluster that this thread has arrived."""

    wait_cluster: Callable[[], None]
    """... and wait until all of its threads are; then all see what each had stored."""


def _scalar(x: mgpu.FragmentedArray) -> ir.Value:
    """Return this thread's element."""
    return vector.extract(value_of(x), [], [0])


def _array(x: ir.Value) -> mgpu.FragmentedArray:
    """Return an array whose element of this thread is x."""
    is_signed = True if isinstance(x.type, ir.IntegerType) else None
    return mgpu.FragmentedArray(
        _registers=np.array([vector_of([x])], dtype=object), _layout=LAYOUT.to_mgpu(), _is_signed=is_signed
    )


def _spread(x: Any) -> Any:
    """Cast to the layout of one element per thread, which constants do not have yet."""
    return plgpu.layout_cast(x, LAYOUT)


def _result(dtype: Any) -> Any:
    return plgpu.ShapeDtypeStruct((THREADS,), dtype, layout=LAYOUT)


def _gather(ref: Any, index: Any) -> Any:
    def load(_: Any, ref: ir.Value, index: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        return _array(memref.load(ref, [as_index(_scalar(index))]))

    return inline(load, REF, LAYOUT, out=_result(ref.dtype))(ref, _spread(index))


def _scatter(ref: Any, index: Any, value: Any, mask: Any) -> None:
    def store(_: Any, ref: ir.Value, *arrays: mgpu.FragmentedArray) -> None:
        index, value, mask = map(_scalar, arrays)
        with utils.when(mask):
            memref.store(value, ref, [as_index(index)])

    inline(store, REF, LAYOUT, LAYOUT, LAYOUT)(ref, _spread(index), _spread(value), _spread(mask))


def _clear(ref: Any) -> None:
    thread = COMPILED.thread()
    of_warp = ref.shape[0] // (THREADS // LANES)
    for first in range(0, of_warp, LANES):
        _scatter(ref, (thread >> 5) * of_warp + (thread & (LANES - 1)) + first, thread * 0, thread >= 0)


def _scatter_to_parts(ref: Any, index: Any, value: Any, num_parts: int) -> None:
    def store(_: Any, ref: ir.Value, *arrays: mgpu.FragmentedArray) -> None:
        index, value = map(_scalar, arrays)
        for part in range(num_parts):
            there = utils.get_cluster_ref(ref, gpu.Dimension.x, const_index(part))
            memref.store(value, there, [as_index(index)])

    inline(store, REF, LAYOUT, LAYOUT)(ref, _spread(index), _spread(value))


def _over_warp(dtype: Any, combine: Callable[[ir.Value], ir.Value]) -> Callable[[Any], Any]:
    def run(_: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        return _array(combine(_scalar(x)))

    return lambda x: inline(run, LAYOUT, out=_result(dtype))(_spread(x))


def _reduce(kind: Any) -> Callable[[Any], Any]:
    return _over_warp(jnp.int32, lambda x: utils.redux(x, const_i32(0xFFFFFFFF), kind))


def _butterfly_sum(x: ir.Value) -> ir.Value:
    for distance in (16, 8, 4, 2, 1):
        x = arith.addf(x, utils.shfl_bfly(x, distance))
    return x


def _scan(x: ir.Value) -> ir.Value:
    lane = arith.remui(utils.thread_idx(), const_i32(LANES))
    for distance in (1, 2, 4, 8, 16):
        step = const_i32(distance)
        before = nvvm.shfl_sync(const_i32(0xFFFFFFFF), x, step, const_i32(0), nvvm.ShflKind.up)
        has_one = arith.cmpi(arith.CmpIPredicate.uge, lane, step)
        x = arith.addi(x, arith.select(has_one, before, const_i32(0)))
    return x


def _run(function: Callable[[], Any]) -> Callable[[], None]:
    def run(_: Any) -> None:
        function()

    return lambda: inline(run)()


COMPILED = ThreadOps(
    thread=lambda: plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=LAYOUT),
    gather=_gather,
    scatter=_scatter,
    clear=_clear,
    scatter_to_parts=_scatter_to_parts,
    warp_max=_reduce(utils.ReductionKind.MAX),
    warp_min=_reduce(utils.ReductionKind.MIN),
    warp_sum=_over_warp(jnp.float32, _butterfly_sum),
    running_sum=_over_warp(jnp.int32, _scan),
    sync_warp=_run(utils.warp_barrier),
    sync_block=lambda _: _run(gpu.barrier)(),
    arrive_cluster=_run(nvvm.cluster_arrive),
    wait_cluster=_run(nvvm.cluster_wait),
)


def _scatter_interpreted(ref: Any, index: Any, value: Any, mask: Any) -> None:
    """Store one element at a time, so that the race detector reports exactly the real races."""

    def store(thread: Any, _: None) -> None:
        @pl.when(mask[thread])
        def _() -> None:
            ref[index[thread]] = value[thread]

    lax.fori_loop(0, THREADS, store, None)


def _clear_interpreted(ref: Any) -> None:
    ref[...] = jnp.zeros(ref.shape, ref.dtype)


def _over_warp_interpreted(combine: Callable[..., Any]) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        warps = x.reshape(-1, LANES)
        return jnp.broadcast_to(combine(warps, axis=1, keepdims=True), warps.shape).reshape(-1)

    return run


def _no_clusters(*_: Any) -> None:
    raise NotImplementedError("the interpreter has no shared memory of other thread blocks")


def _sync_interpreted(barrier: Any) -> None:
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


INTERPRETED = ThreadOps(
    thread=lambda: lax.iota(jnp.int32, THREADS),
    gather=lambda ref, index: jnp.take(ref[...], index, mode="clip"),
    scatter=_scatter_interpreted,
    clear=_clear_interpreted,
    scatter_to_parts=_no_clusters,
    warp_max=_over_warp_interpreted(jnp.max),
    warp_min=_over_warp_interpreted(jnp.min),
    warp_sum=_over_warp_interpreted(jnp.sum),
    running_sum=lambda x: jnp.cumsum(x.reshape(-1, LANES), axis=1).reshape(-1),
    sync_warp=lambda: None,
    sync_block=_sync_interpreted,
    arrive_cluster=_no_clusters,
    wait_cluster=_no_clusters,
)
