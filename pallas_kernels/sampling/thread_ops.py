"""Per-thread operations of the sampling kernel, below the level of Pallas: a histogram with a column per thread, sums
within a warp, running sums within a warpgroup.

The CTAs of a cluster may divide the work into parts; they exchange results by writing into each other's shared memory.
Each operation exists twice: in MLIR for the GPU, and in jax.numpy for the interpreter on a CPU, which lacks
`inline_mgpu` and, here, clusters.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.mlir import REF, as_index, const_i32, const_index, elements_of, inline
from pallas_kernels.jax_internals import arith, gpu, ir, memref, nvvm, vector

GROUP_THREADS = 128
_WARP = 32


class ThreadOps(NamedTuple):
    """Arrays are spread over a warpgroup's threads in a WG_STRIDED `layout`."""

    iota: Callable[[int, Any], Any]
    """(n, layout) -> 0 .. n - 1."""

    full: Callable[[int, float, Any], Any]
    """(n, value, layout) -> n times the value."""

    add_to_histogram: Callable[..., None]
    """(histogram[buckets, threads], distance, low, high, scale, rate, group, layout): add exp2(distance * rate), or 1
    if `rate` is None, for each distance in [low, high) of a thread, in its own column of the bucket floor((distance -
    low) * scale), or of the last one.
    """

    total_rows: Callable[..., None]
    """(histogram, totals[parts, buckets], group, num_groups): sum the warpgroup's part of the buckets over their
    columns, and clear them. All threads must have added before.
    """

    find_bucket: Callable[..., None]
    """(totals[parts, 64], found[5], below, target, fraction): set `found` to the first bucket at which the running sum,
    from `below` on, reaches the target, or the last bucket if none does; the sum before it; the sum including it; the
    target; the whole sum. A negative target means this `fraction` of the whole sum.
    """

    warp_maxima: Callable[..., None]
    """(maxima[parts, warps], values, group, layout): set maxima[p, w] to the largest value of warp w, NaN if it has
    one: for the four warps of a warpgroup, or all of the CTA. Threads of the warpgroup see it at once.
    """

    sum_warps: Callable[..., None]
    """(sums[4, n], i, values, layout, parts): in the first part, sums[w, i] becomes the sum of what warp w of the group
    holds."""

    sync_cluster: Callable[[], None]
    """Wait for all threads of the cluster; their stores are visible to all then."""

    running_sums: Callable[..., Any]
    """(scratch[4], values, layout) -> the sum of each value and those before it. Contiguous values in each thread."""


def _f32() -> ir.Type:
    return ir.F32Type.get()


def _lanes(x: mgpu.FragmentedArray) -> list[ir.Value]:
    """Return the scalars that a thread holds, in order."""
    return [lane for register in x.registers.flat for lane in elements_of(register, register.type.shape[0])]


def _thread() -> ir.Value:
    return as_index(utils.thread_idx())


def _store_in_parts(value: ir.Value, ref: ir.Value, indices: list[ir.Value], num_parts: int) -> None:
    """Store a value at the same index in the shared memory of every CTA of the cluster."""
    if num_parts == 1:
        memref.store(value, ref, indices)
        return
    for part in range(num_parts):
        memref.store(value, utils.get_cluster_ref(ref, gpu.Dimension.x, const_index(part)), indices)


def _part(num_parts: int) -> ir.Value:
    return gpu.cluster_block_id(gpu.Dimension.x) if num_parts > 1 else const_index(0)


def _over_warp(combine: Callable[[ir.Value, ir.Value], ir.Value], x: ir.Value) -> ir.Value:
    for distance in (16, 8, 4, 2, 1):
        x = combine(x, utils.shfl_bfly(x, distance))
    return x


def _shuffle(x: ir.Value, lane: ir.Value, kind: Any, clamp: int) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    there = nvvm.shfl_sync(const_i32(0xFFFFFFFF), utils.bitcast(x, i32), lane, const_i32(clamp), kind)
    return utils.bitcast(there, x.type)


def _from_lane(x: ir.Value, lane: ir.Value) -> ir.Value:
    """Return the x of a lane of the warp."""
    return _shuffle(x, lane, nvvm.ShflKind.idx, _WARP - 1)


def _from_before(x: ir.Value, distance: int, lane: ir.Value) -> ir.Value:
    """Return the x of the lane `distance` before this one, 0 for the first ones."""
    there = _shuffle(x, utils.c(distance, lane.type), nvvm.ShflKind.up, 0)
    has_one = arith.cmpi(arith.CmpIPredicate.uge, lane, utils.c(distance, lane.type))
    return arith.select(has_one, there, utils.c(0.0, x.type))


def _running_over_warp(x: ir.Value, lane: ir.Value) -> ir.Value:
    """Return the sum over the lanes up to this one."""
    for distance in (1, 2, 4, 8, 16):
        x = arith.addf(x, _from_before(x, distance, lane))
    return x


def _add(values: list[ir.Value]) -> ir.Value:
    """Sum pairwise, for shorter chains and smaller rounding errors."""
    while len(values) > 1:
        values = [
            arith.addf(*values[i : i + 2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)
        ]
    return values[0]


def _add_to_histogram(
    histogram: Any, distance: Any, low: Any, high: Any, scale: Any, rate: Any, group: Any, layout: Any
) -> None:
    del group
    num_buckets = histogram.shape[0]

    def add(_: Any, histogram: ir.Value, distance: mgpu.FragmentedArray, *scalars: mgpu.FragmentedArray) -> None:
        low, high, scale, *rate = (x.registers.item() for x in scalars)
        i32 = ir.IntegerType.get_signless(32)
        thread = _thread()
        lanes = _lanes(distance)
        are_inside = [
            arith.andi(arith.cmpf(arith.CmpFPredicate.OGE, x, low), arith.cmpf(arith.CmpFPredicate.OLT, x, high))
            for x in lanes
        ]
        # In late passes hardly any warp has one.
        with utils.when(functools.reduce(arith.ori, are_inside)):
            for x, is_inside in zip(lanes, are_inside, strict=True):
                with utils.when(is_inside):
                    position = arith.mulf(arith.subf(x, low), scale)
                    position = arith.minnumf(position, utils.c(num_buckets - 1.0, _f32()))
                    # Rounded down into the last bits of a sum: converting to integers is four times as slow.
                    position = utils.inline_ptx(
                        "add.rm.f32 $0, $1, $2;", position, utils.c(2.0**23, _f32()), result_types=_f32()
                    )
                    bucket = arith.andi(utils.bitcast(position, i32), const_i32(num_buckets - 1))
                    here = [as_index(bucket), thread]
                    value = utils.c(1.0, _f32())
                    if rate:
                        value = utils.inline_ptx(
                            "ex2.approx.ftz.f32 $0, $1;", arith.mulf(x, rate[0]), result_types=_f32()
                        )
                    memref.store(arith.addf(memref.load(histogram, here), value), histogram, here)

    scalars = (low, high, scale) if rate is None else (low, high, scale, rate)
    types = (REF, layout, *(plgpu.Layout.WG_SPLAT,) * len(scalars))
    inline(add, *types)(histogram, distance, *scalars)


def _total_rows(histogram: Any, totals: Any, group: Any, num_groups: int) -> None:
    del group
    num_buckets, num_threads = histogram.shape
    num_parts = totals.shape[0]
    rows_per_warp = num_buckets // (4 * num_groups)
    four = 4

    def total(_: Any, histogram: ir.Value, totals: ir.Value) -> None:
        quad = ir.VectorType.get((four,), _f32())
        thread = _thread()
        warp, lane = arith.divui(thread, const_index(_WARP)), arith.remui(thread, const_index(_WARP))
        zeros = vector.broadcast(quad, utils.c(0.0, _f32()))
        sums = []
        for i in range(rows_per_warp):
            row = arith.addi(arith.muli(warp, const_index(rows_per_warp)), const_index(i))
            parts = []
            for j in range(num_threads // (_WARP * four)):
                column = arith.addi(arith.muli(lane, const_index(four)), const_index(j * _WARP * four))
                parts.append(vector.load(quad, histogram, [row, column]))
                vector.store(zeros, histogram, [row, column])
            part = _add(parts)
            sums.append((row, _over_warp(arith.addf, _add(elements_of(part, four)))))
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, const_index(0))):
            for row, x in sums:
                _store_in_parts(x, totals, [_part(num_parts), row], num_parts)

    inline(total, REF, REF)(histogram, totals)


def _find_bucket(totals: Any, found: Any, below: Any, target: Any, fraction: Any) -> None:
    num_parts, num_buckets = totals.shape
    assert num_buckets == 2 * _WARP

    def find(_: Any, totals: ir.Value, found: ir.Value, *scalars: mgpu.FragmentedArray) -> None:
        below, target, fraction = (x.registers.item() for x in scalars)
        lane = arith.remui(utils.thread_idx(), const_i32(_WARP))
        first = arith.muli(lane, const_i32(2))
        first_index = as_index(first)
        second_index = arith.addi(first_index, const_index(1))

        def total(index: ir.Value) -> ir.Value:
            return _add([memref.load(totals, [const_index(part), index]) for part in range(num_parts)])

        here = total(first_index)
        pair = arith.addf(here, total(second_index))
        running = _running_over_warp(pair, lane)
        before = arith.addf(below, _from_before(running, 1, lane))
        between = arith.addf(before, here)
        after = arith.addf(below, running)
        whole = _from_lane(after, const_i32(_WARP - 1))
        is_fraction = arith.cmpf(arith.CmpFPredicate.OLT, target, utils.c(0.0, _f32()))
        target = arith.select(is_fraction, arith.mulf(fraction, whole), target)

        def reaches(x: ir.Value) -> ir.Value:
            return arith.cmpf(arith.CmpFPredicate.OGE, x, target)

        last = const_i32(2 * _WARP - 1)
        bucket = arith.select(reaches(after), arith.addi(first, const_i32(1)), last)
        bucket = _over_warp(arith.minui, arith.select(reaches(between), first, bucket))
        is_second = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(bucket, const_i32(1)), const_i32(0))
        owner = arith.shrui(bucket, const_i32(1))
        before = _from_lane(arith.select(is_second, between, before), owner)
        reached = _from_lane(arith.select(is_second, after, between), owner)
        for i, x in enumerate((arith.uitofp(_f32(), bucket), before, reached, target, whole)):
            memref.store(x, found, [const_index(i)])
        utils.warp_barrier()

    scalar = plgpu.Layout.WG_SPLAT
    inline(find, REF, REF, scalar, scalar, scalar)(totals, found, below, target, fraction)


def _warp_maxima(maxima: Any, values: Any, group: Any, layout: Any) -> None:
    del group
    num_parts, num_warps = maxima.shape

    def find(_: Any, maxima: ir.Value, values: mgpu.FragmentedArray) -> None:
        largest = _over_warp(arith.maximumf, functools.reduce(arith.maximumf, _lanes(values)))
        warp = arith.remui(arith.divui(_thread(), const_index(_WARP)), const_index(num_warps))
        lane = arith.remui(_thread(), const_index(_WARP))
        utils.warpgroup_barrier()
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, const_index(0))):
            _store_in_parts(largest, maxima, [_part(num_parts), warp], num_parts)
        utils.warpgroup_barrier()

    inline(find, REF, layout)(maxima, values)


def _sum_warps(sums: Any, i: Any, values: Any, layout: Any, num_parts: int) -> None:
    def add(_: Any, sums: ir.Value, values: mgpu.FragmentedArray) -> None:
        total = _over_warp(arith.addf, _add(_lanes(values)))
        thread = arith.remui(_thread(), const_index(GROUP_THREADS))
        warp, lane = arith.divui(thread, const_index(_WARP)), arith.remui(thread, const_index(_WARP))
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, const_index(0))):
            if num_parts == 1:
                memref.store(total, sums, [warp, const_index(0)])
            else:
                first_part = utils.get_cluster_ref(sums, gpu.Dimension.x, const_index(0))
                memref.store(total, first_part, [warp, const_index(0)])

    inline(add, REF, layout)(sums.at[:, pl.ds(i, 1)], values)


def _running_sums(scratch: Any, values: Any, layout: Any) -> Any:
    (n,) = values.shape

    def run(_: Any, scratch: ir.Value, values: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        zero = utils.c(0.0, _f32())
        thread = arith.remui(utils.thread_idx(), const_i32(GROUP_THREADS))
        warp, lane = arith.divui(thread, const_i32(_WARP)), arith.remui(thread, const_i32(_WARP))

        running: list[ir.Value] = []
        for x in _lanes(values):
            running.append(arith.addf(running[-1], x) if running else x)
        in_warp = _running_over_warp(running[-1], lane)
        utils.warpgroup_barrier()
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, const_i32(_WARP - 1))):
            memref.store(in_warp, scratch, [as_index(warp)])
        utils.warpgroup_barrier()
        before = _from_before(in_warp, 1, lane)
        for i in range(3):
            is_before = arith.cmpi(arith.CmpIPredicate.ugt, warp, const_i32(i))
            before = arith.addf(before, arith.select(is_before, memref.load(scratch, [const_index(i)]), zero))
        [register] = values.registers.flat
        result = vector.from_elements(register.type, [arith.addf(before, x) for x in running])
        registers = values.registers.copy()
        registers.flat[0] = result
        return mgpu.FragmentedArray(_registers=registers, _layout=values.layout, _is_signed=None)

    result = plgpu.ShapeDtypeStruct((n,), jnp.float32, layout=layout)
    return inline(run, REF, layout, out=result)(scratch, values)


def _sync_cluster() -> None:
    def sync(_: Any) -> None:
        nvvm.cluster_arrive()
        nvvm.cluster_wait()

    inline(sync)()


COMPILED = ThreadOps(
    iota=lambda n, layout: plgpu.broadcasted_iota(jnp.int32, (n,), 0, layout=layout),
    full=lambda n, value, layout: plgpu.layout_cast(jnp.full((n,), value, jnp.float32), layout),
    add_to_histogram=_add_to_histogram,
    total_rows=_total_rows,
    find_bucket=_find_bucket,
    warp_maxima=_warp_maxima,
    sum_warps=_sum_warps,
    sync_cluster=_sync_cluster,
    running_sums=_running_sums,
)


def _add_to_histogram_interpreted(
    histogram: Any, distance: Any, low: Any, high: Any, scale: Any, rate: Any, group: Any, layout: Any
) -> None:
    del layout
    num_buckets = histogram.shape[0]
    distance = distance.reshape(GROUP_THREADS, -1)
    bucket = jnp.clip((distance - low) * scale, 0, num_buckets - 1.0).astype(jnp.int32)
    bucket = jnp.where((distance >= low) & (distance < high), bucket, -1)
    is_it = bucket[None] == jnp.arange(num_buckets)[:, None, None]
    added = jnp.where(is_it, 1.0 if rate is None else jnp.exp2(distance * rate)[None], 0.0)
    columns = histogram.at[:, pl.ds(group * GROUP_THREADS, GROUP_THREADS)]
    columns[...] += jnp.sum(added, axis=2)


def _total_rows_interpreted(histogram: Any, totals: Any, group: Any, num_groups: int) -> None:
    num_rows = histogram.shape[0] // num_groups
    rows = pl.ds(group * num_rows, num_rows)
    totals[0, rows] = jnp.sum(histogram[rows], axis=1)
    histogram[rows] = jnp.zeros((num_rows, histogram.shape[1]), jnp.float32)


def _find_bucket_interpreted(totals: Any, found: Any, below: Any, target: Any, fraction: Any) -> None:
    each = jnp.sum(totals[...], axis=0)
    running = below + jnp.cumsum(each)
    whole = running[-1]
    target = jnp.where(target < 0, fraction * whole, target)
    bucket = jnp.minimum(jnp.sum(running < target), len(each) - 1)
    reached = jnp.max(jnp.where(jnp.arange(len(each)) == bucket, running, 0.0))
    before = jnp.where(bucket > 0, jnp.max(jnp.where(jnp.arange(len(each)) == bucket - 1, running, 0.0)), below)
    found[...] = jnp.stack([bucket.astype(jnp.float32), before, reached, target, whole])


def _warp_maxima_interpreted(maxima: Any, values: Any, group: Any, layout: Any) -> None:
    del layout
    first = group * 4 % maxima.shape[1]
    maxima[0, pl.ds(first, 4)] = jnp.max(values.reshape(4, -1), axis=1)


def _sum_warps_interpreted(sums: Any, i: Any, values: Any, layout: Any, num_parts: int) -> None:
    del layout, num_parts
    sums[:, pl.ds(i, 1)] = jnp.sum(values.reshape(4, -1), axis=1)[:, None]


def _no_clusters() -> None:
    raise NotImplementedError("the interpreter has no shared memory of other thread blocks")


INTERPRETED = ThreadOps(
    iota=lambda n, _: lax.broadcasted_iota(jnp.int32, (n,), 0),
    full=lambda n, value, _: jnp.full((n,), value, jnp.float32),
    add_to_histogram=_add_to_histogram_interpreted,
    total_rows=_total_rows_interpreted,
    find_bucket=_find_bucket_interpreted,
    warp_maxima=_warp_maxima_interpreted,
    sum_warps=_sum_warps_interpreted,
    sync_cluster=_no_clusters,
    running_sums=lambda _scratch, values, _layout: jnp.cumsum(values),
)
