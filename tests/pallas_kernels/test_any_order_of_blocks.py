"""Kernels with clusters or counters, whose CTAs run all at once, in any order. `layer_matmuls`, `all_reduce` and expert
routing have files of their own.
"""

import collections
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_gated_linear_unit
import test_paged_attention_sm90
import test_ragged_prefill_attention_sm90 as test_prefill_sm90
import test_sampling_sm90
import test_small_matmul
from depths import quick_first, quick_only
from emulated_grid import emulate
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import counters, registers, vectors_of_8_bits
from pallas_kernels.device import product_of_tiles as gated_kernel
from pallas_kernels.gated_linear_unit.sm90 import gated_linear_unit_sm90
from pallas_kernels.paged_attention import device as paged_device
from pallas_kernels.paged_attention import kernel as paged_kernel
from pallas_kernels.paged_attention import query_columns, query_rows
from pallas_kernels.paged_attention import sm90 as paged_sm90
from pallas_kernels.paging import tiles
from pallas_kernels.ragged_prefill_attention import device as prefill_device
from pallas_kernels.ragged_prefill_attention import sm90 as prefill_sm90
from pallas_kernels.ragged_prefill_attention import sm90_kernel as prefill_kernel
from pallas_kernels.ragged_prefill_attention import wide_kernel
from pallas_kernels.sampling import kernel as sampling_kernel
from pallas_kernels.sampling import sm90 as sampling_sm90
from pallas_kernels.sampling import thread_ops
from pallas_kernels.small_matmul import sm90 as small_sm90
from pallas_kernels.small_matmul.sm90 import Epilogue, matmul_sm90

WRONG_RESULT = "assert |wrong result"


def no_fault(grid, monkeypatch):
    """All as it is."""


def run_gated_linear_unit(monkeypatch, name, seed, fault=no_fault):
    problem, config = test_gated_linear_unit.INTERPRETED[name]
    x, weight, want = test_gated_linear_unit.make_case(**problem)
    fault(emulate(monkeypatch, gated_kernel, seed=seed, of_jax=True), monkeypatch)
    with jax.disable_jit():
        got = gated_linear_unit_sm90(x, weight, activation=jax.nn.silu, config=config)
    test_gated_linear_unit.check(got, want)


@pytest.mark.parametrize("seed", quick_first(range(2)))
@pytest.mark.parametrize("name", quick_first(test_gated_linear_unit.INTERPRETED))
def test_gated_linear_unit_of_a_cluster(monkeypatch, name, seed):
    """With weights of which each CTA of a cluster fetches a part for all."""
    run_gated_linear_unit(monkeypatch, name, seed)


SMALL = {
    "two split K": (
        {"num_rows": 40, "outputs": 88, "depth": 512},
        small_sm90.Config(outputs=16, block_k=64, stages=2, cluster=2),
    ),
    "four split K": (
        {"num_rows": 64, "outputs": 128, "depth": 448, "is_gated": True, "has_residual": True},
        small_sm90.Config(outputs=16, block_k=64, stages=3, cluster=4),
    ),
    "tiles in turns": (
        {"num_rows": 5, "outputs": 88, "depth": 256, "has_residual": True},
        small_sm90.Config(outputs=16, block_k=64, stages=2, max_ctas=2),
    ),
}


def run_small_matmul(monkeypatch, name, seed, fault=no_fault):
    problem, config = SMALL[name]
    x, weight, options, want = test_small_matmul.make_case(**problem)
    epilogue = Epilogue(activation=jax.nn.silu if "is_gated" in problem else None)
    fault(emulate(monkeypatch, small_sm90, seed=seed, of_jax=True), monkeypatch)
    with jax.disable_jit():
        got, _, _ = matmul_sm90(x, weight, **options, config=config, epilogue=epilogue)
    test_small_matmul.check(got, want)


@pytest.mark.parametrize("seed", quick_first(range(2)))
@pytest.mark.parametrize("name", quick_first(SMALL))
def test_small_matmul_of_a_cluster(monkeypatch, name, seed):
    run_small_matmul(monkeypatch, name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_norm_between_small_matmuls_of_clusters(monkeypatch, seed):
    x, weight, options, y_want = test_small_matmul.make_case(24, 72, 192, has_residual=True)
    [gain] = test_small_matmul.arrays([(72,)], jnp.float32)
    config = small_sm90.Config(outputs=16, block_k=64, stages=2, cluster=2)
    emulate(monkeypatch, small_sm90, seed=seed, of_jax=True)
    with jax.disable_jit():
        y, scaled, squares = matmul_sm90(x, weight, **options, gain=gain, config=config, epilogue=Epilogue())
    test_small_matmul.check(y, y_want)
    assert scaled is not None
    assert squares is not None
    rounded = np.asarray(y, np.float32)
    np.testing.assert_allclose(np.asarray(squares).sum(axis=1)[:24], (rounded**2).sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(scaled, np.float32), rounded * np.asarray(gain), rtol=2**-8)


PAGED = test_paged_attention_sm90.INTERPRETED | {
    "parts of one context": {"lens": [900], "heads": (4, 1, 64)},
    "parts of one context, queries as rows": {"lens": [900], "heads": (4, 1, 32)},
    "nothing but padding": {"lens": [0, 0, 1], "heads": (2, 2, 64)},
}


def run_paged_attention(monkeypatch, name, seed, fault=no_fault, *, streams=1):
    arrays, options, want = test_paged_attention_sm90.make_case(**PAGED[name])
    config = test_paged_attention_sm90.small_config(**PAGED[name], streams=streams)
    grid = emulate(monkeypatch, paged_kernel, query_columns, query_rows, tiles, paged_sm90, seed=seed)
    monkeypatch.setattr(paged_sm90, "jnp", jnp)

    def put(ref, values):
        ref[...] = values

    def put_first(ref, values):
        put(ref.at[pl.ds(0, len(values))], values)

    monkeypatch.setattr(counters, "signal", grid.signal)
    monkeypatch.setattr(counters, "take", grid.wait_and_take)
    monkeypatch.setattr(registers, "store_first_rows", lambda ref, x, **_: grid.store(ref, x[: ref.shape[0]]))
    monkeypatch.setattr(paged_device, "store_columns", lambda ref, x, **_: put(ref, x.T[: ref.shape[0]]))
    monkeypatch.setattr(paged_device, "store_vector", lambda ref, x: put(ref.at[pl.ds(0, x.shape[1])], x[0]))
    monkeypatch.setattr(paged_device, "copy_rows", lambda swizzled, rows, **_: put_first(swizzled, rows[...]))
    monkeypatch.setattr(paged_device, "store_transposed", lambda swizzled, x: put(swizzled, x.T))
    monkeypatch.setattr(paged_device, "maxima", lambda x, *_, **__: x.max(axis=0))
    monkeypatch.setattr(paged_device, "sums", lambda x, *_, **__: x.sum(axis=0))

    def scales(ref, kind, shape, **_):
        return np.broadcast_to(ref[...][:, kind].reshape(-1, 1), shape)

    def convert(target, source, *, held=None, **_):
        values, row = source[...].astype(np.float16), np.arange(source.shape[0])[:, None]
        put(target, values if held is None else np.where((row >= held[0]) & (row < held[1]), values, 0))

    in_float16 = {
        "as_operand": lambda ref, first, last, **_: vectors_of_8_bits.permuted(ref[...].astype(np.float16))[
            :, first:last
        ],
        "convert": convert,
        "put_queries": lambda target, source, **_: put_first(
            target, vectors_of_8_bits.permuted(source[...].astype(np.float16))
        ),
    }
    for operation, emulated in ({"scales": scales, "wait_for_all": lambda **_: None} | in_float16).items():
        monkeypatch.setattr(vectors_of_8_bits, operation, emulated)
    fault(grid, monkeypatch)
    with jax.disable_jit():
        attend: Any = paged_sm90.paged_attention_sm90
        got = attend(*arrays, **options, config=config)
    test_paged_attention_sm90.check(got, want)


@pytest.mark.parametrize(("streams", "seed"), quick_first([(1, 0), (2, 1)]))
@pytest.mark.parametrize("name", quick_only(PAGED, "parts of one context"))
def test_parts_of_contexts(monkeypatch, name, streams, seed):
    """Contexts that are split over several CTAs, combined by one that waits for the others."""
    run_paged_attention(monkeypatch, name, seed, streams=streams)


PREFILL = ("head_dim 512", "head_dim 384")


def run_prefill_attention(monkeypatch, name, seed, fault=no_fault):
    arrays, layout, want = test_prefill_sm90.make_case(**test_prefill_sm90.INTERPRETED[name])
    grid = emulate(monkeypatch, wide_kernel, prefill_kernel, seed=seed)
    for operation in (prefill_device.mask_after, prefill_device.mask_window, prefill_device.reciprocal):
        interpreted = functools.partial(_in_numpy, operation)
        monkeypatch.setattr(prefill_kernel, operation.__name__, interpreted)
    biased = functools.partial(_in_numpy, prefill_device.scale_and_add_alibi)
    monkeypatch.setattr(prefill_kernel, "scale_and_add_alibi", biased)

    def clear_rows(ref, first, **_):
        ref[pl.Slice(int(first), ref.shape[0] - int(first))] = 0

    def store_rows(ref, x, token, head, num_rows, *, first_column, **_):
        for row in range(num_rows):
            ref[token + row, head, pl.Slice(first_column, x.shape[1])] = x[row]

    monkeypatch.setattr(wide_kernel, "clear_rows", clear_rows)
    monkeypatch.setattr(wide_kernel, "store_rows", store_rows)
    fault(grid, monkeypatch)
    config = dataclasses.replace(prefill_sm90.heuristic(arrays[0].shape[2]), num_ctas=4)
    with jax.disable_jit():
        attend: Any = prefill_sm90.ragged_prefill_attention_sm90
        got = attend(*arrays, **layout, config=config)
    test_prefill_sm90.check(got, want)


def _in_numpy(operation, *args, interpret, **kwargs):
    return np.asarray(operation(*args, interpret=True, **kwargs))


@pytest.mark.parametrize("seed", quick_first(range(4)))
@pytest.mark.parametrize("name", quick_first(PREFILL))
def test_prompts_of_large_heads_by_a_cluster(monkeypatch, name, seed):
    """With keys and values of which each CTA of a pair fetches a part for both."""
    run_prefill_attention(monkeypatch, name, seed)


def run_sampling(monkeypatch, num_parts, seed, fault=no_fault):
    rng = np.random.default_rng(0)
    rows = [test_sampling_sm90.ROWS[i] for i in (0, 12)]
    logits = test_sampling_sm90.make_logits(rng, len(rows), 1333, grid=0.25, masked=0.2)
    uniform = rng.random((len(rows), 2), np.float32)
    arguments = test_sampling_sm90.columns(rows) | {"uniform": jnp.asarray(uniform)}
    grid = emulate(monkeypatch, sampling_kernel, sampling_sm90, seed=seed, of_jax=True)
    for module in (sampling_kernel, sampling_sm90):
        monkeypatch.setattr(module, "jnp", jnp)  # which knows numbers that have no precision of their own

    def part():
        return int(grid.axis_index("part"))

    def total_rows(histogram, totals, group, num_groups):
        size = histogram.shape[0] // num_groups
        rows = histogram.at[pl.ds(int(group) * size, size)]
        sums = np.asarray(rows[...]).sum(axis=1)
        rows[...] = 0.0
        for there in grid.in_cluster(totals.at[part(), pl.ds(int(group) * size, size)]):
            grid.store(there, sums)

    def warp_maxima(maxima, values, group, layout):
        largest = np.asarray(values).reshape(4, -1).max(axis=1)
        num_parts, num_warps = maxima.shape
        own = maxima.at[part() if num_parts > 1 else 0, pl.ds(int(group) * 4 % num_warps, 4)]
        for there in grid.in_cluster(own) if num_parts > 1 else [own]:
            grid.store(there, largest)

    def sum_warps(sums, i, values, layout, num_parts):
        there = grid.in_cluster(sums.at[:, int(i)])[0]
        grid.store(there, np.asarray(values).reshape(4, -1).sum(axis=1))

    of_clusters = {"total_rows": total_rows, "warp_maxima": warp_maxima, "sum_warps": sum_warps}
    ops = thread_ops.INTERPRETED._replace(**of_clusters, sync_cluster=grid.sync_cluster)
    monkeypatch.setattr(sampling_sm90, "COMPILED", ops)
    fault(grid, monkeypatch)
    with jax.disable_jit():
        tokens, maximum = sampling_sm90.sample_sm90(jnp.asarray(logits), **arguments, num_parts=num_parts)
    np.testing.assert_array_equal(maximum, logits.max(axis=1))
    test_sampling_sm90.check(tokens, logits, rows, uniform)


@pytest.mark.slow
@pytest.mark.parametrize(("num_parts", "seed"), [(1, 0), (2, 0), (2, 1), (4, 0)])
def test_sampling_by_a_cluster(monkeypatch, num_parts, seed):
    """The CTAs write what others need to know into their memory. With four, some have no part of a row."""
    run_sampling(monkeypatch, num_parts, seed)


def leave_out_a_wait_for_a_slot(grid, monkeypatch):
    """The copying warpgroup is a round ahead from then on."""
    wait = grid.barrier_wait
    waits = collections.Counter()

    def wait_but_once(barrier):
        waits[grid.current] += 1
        if grid.current.group != 2 or waits[grid.current] != 6:
            wait(barrier)

    monkeypatch.setattr(plgpu, "barrier_wait", wait_but_once)


def free_slots_of_one_block(grid, monkeypatch):
    """And not of the others of its cluster."""
    arrive = grid.barrier_arrive

    def arrive_here(barrier):
        barriers, index = barrier if isinstance(barrier, tuple) else (barrier, 0)
        if barriers.of_all:
            grid.pause()
            barriers.arrive(index, barriers.units * grid.cluster)
        else:
            arrive(barrier)

    monkeypatch.setattr(plgpu, "barrier_arrive", arrive_here)


def end_before_others(grid, monkeypatch):
    """The copying warpgroup does not wait at the end until everything it has copied has been read."""
    wait = grid.barrier_wait
    waits = collections.Counter()

    def wait_but_at_last(barrier):
        if grid.current.group == 2:
            waits[grid.current] += 1
            if waits[grid.current] > 10:  # two items of five steps
                return
        wait(barrier)

    monkeypatch.setattr(plgpu, "barrier_wait", wait_but_at_last)


def take_sums_that_have_not_come(grid, monkeypatch):
    wait = grid.barrier_wait
    monkeypatch.setattr(
        plgpu, "barrier_wait", lambda barrier: None if barrier is grid.shared[grid.current.block][-1] else wait(barrier)
    )


def write_results_over(grid, monkeypatch):
    """Results of the previous item may not have been read."""
    wait = grid.wait_smem_to_gmem

    def wait_for_all(but, wait_read_only=False):
        if not wait_read_only:
            wait(but)

    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", wait_for_all)


def write_results_of_tiles_over(grid, monkeypatch):
    """All but the last wait, which is the fourth."""
    wait = grid.wait_smem_to_gmem
    waits = collections.Counter()

    def wait_at_last(but, wait_read_only=False):
        waits[grid.current] += 1
        if waits[grid.current] == 4:
            wait(but, wait_read_only)

    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", wait_at_last)


def take_parts_that_have_not_come(grid, monkeypatch):
    def take(counter, value, **_):
        grid.pause()
        counter.write(counter.read() - value)

    monkeypatch.setattr(counters, "take", take)


def leave_parts_uncounted(grid, monkeypatch):
    monkeypatch.setattr(counters, "signal", lambda *_, **__: None)


def keep_arrivals(grid, monkeypatch):
    monkeypatch.setattr(counters, "take", grid.wait)


def go_on_without_the_others(grid, monkeypatch):
    monkeypatch.setattr(sampling_sm90, "COMPILED", sampling_sm90.COMPILED._replace(sync_cluster=lambda: None))


@pytest.mark.parametrize(
    ("run", "name", "fault", "found"),
    quick_first(
        [
            (run_gated_linear_unit, "shared weights", leave_out_a_wait_for_a_slot, "all wait"),
            (run_gated_linear_unit, "shared weights", free_slots_of_one_block, WRONG_RESULT),
            (run_gated_linear_unit, "shared weights", end_before_others, "has ended|nobody has waited for"),
            (run_gated_linear_unit, "several pieces", write_results_over, WRONG_RESULT),
            (run_small_matmul, "two split K", take_sums_that_have_not_come, "has ended|nobody has waited for"),
            (run_small_matmul, "tiles in turns", write_results_of_tiles_over, WRONG_RESULT),
            (run_paged_attention, "parts of one context", take_parts_that_have_not_come, WRONG_RESULT),
            (run_paged_attention, "parts of one context", leave_parts_uncounted, "all wait"),
            (run_paged_attention, "parts of one context", keep_arrivals, "a counter that the next layer"),
            (run_prefill_attention, "head_dim 512", free_slots_of_one_block, WRONG_RESULT),
            (run_sampling, 2, go_on_without_the_others, "has ended|not equal"),
        ]
    ),
)
def test_faults_are_found(monkeypatch, run, name, fault, found):
    """In one of a few orders: each order finds most faults, and none finds all."""
    messages = []
    for seed in range(6):
        with monkeypatch.context() as patches:
            try:
                run(patches, name, seed, fault)
            except AssertionError as error:
                messages.append(str(error))
                if re.search(found, messages[-1]):
                    return
    pytest.fail(f"not found, but {messages}")
