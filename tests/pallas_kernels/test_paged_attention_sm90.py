"""The Hopper kernel of paged attention: interpreted on a CPU with race detection, compiled for an H200 without one, and
run on one if there is one; always with NaN in everything outside the contexts.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_paged_attention as of_rows
from depths import quick_first
from interpreting import interpret
from kernel_results import in_float
from poisoned_pages import make_scores, shapes_of_pages, shapes_of_scores
from rounded_pages import rounded_pages

from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.sm90 import Config, paged_attention_sm90
from pallas_kernels.paging.plan import BLOCK_COST, CUT_COST, MIN_PART, TILE_COST, make_plan

# Relative to the norm of the result: weights are rounded to the dtype of the pages, and so is the result, to 8 bits or
# 11. A row alone, with a few hundred values, may be somewhat worse.
TOLERANCE = {jnp.bfloat16: 2.5e-3, jnp.float16: 4e-4}
OF_A_ROW = 1.5


def make_case(lens, *, heads, block_size=16, num_queries=1, dtype=jnp.bfloat16, kv_dtype=None, **options):
    """Arguments of `paged_attention`, arrays and then the others, and the result it should have."""
    rng = np.random.default_rng(len(lens) + sum(lens))
    arrays, layout = of_rows.make_case(
        rng, lens, num_queries=num_queries, max_blocks=None, heads=heads, block_size=block_size, dtype=dtype
    )
    scores = make_scores(rng, heads[0], **{"scale": heads[2] ** -0.5} | options)
    if kv_dtype is not None:
        arrays = arrays[0], rounded_pages(arrays[1], kv_dtype)
    want = of_rows.expected(arrays, layout, scores)
    # Room for results of others.
    return arrays, layout | {"scores": jax.tree.map(jnp.asarray, scores), "room": len(lens) + 3}, want


def check(got, want):
    want_out, want_lse = want
    assert len(got[0]) == len(want_out) + 3
    out, lse = in_float([x[: len(want_out)] for x in got])  # what is behind them was never written
    tolerance = TOLERANCE[got[0].dtype.type]
    assert np.linalg.norm(out - want_out) <= tolerance * np.linalg.norm(want_out)
    for row, (a, b) in enumerate(zip(out, want_out, strict=True)):
        error = np.linalg.norm(a - b)
        assert error <= OF_A_ROW * tolerance * np.linalg.norm(b), f"row {row}: {error / np.linalg.norm(b)}"
    is_nothing = np.isneginf(want_lse)
    np.testing.assert_array_equal(np.isneginf(lse), is_nothing)
    np.testing.assert_allclose(lse[~is_nothing], want_lse[~is_nothing], atol=2e-3)


SINKS_AND_ALL = {"has_sinks": True, "has_alibi": True, "sliding_window": 90, "soft_cap": 4.0}
FP8 = {"kv_dtype": jnp.float8_e4m3fn}
# Contexts that several CTAs have parts of, and CTAs with several contexts, with empty rows in between.
INTERPRETED = {
    "decode": {"lens": [70, 0, 300, 5], "heads": (4, 2, 64)},
    "decode, queries as rows": {"lens": [70, 0, 300, 5], "heads": (4, 2, 32)},
    "ALiBi": {"lens": [70, 200], "heads": (4, 2, 16), "has_alibi": True},
    "verification": {"lens": [70, 12, 300], "heads": (4, 1, 64), "num_queries": 3} | SINKS_AND_ALL,
    "verification, queries as rows": SINKS_AND_ALL
    | {"lens": [70, 12, 300], "heads": (4, 2, 16), "block_size": 128, "num_queries": 3, "dtype": jnp.float16},
    "pages of 8 bits": {"lens": [70, 0, 300, 5], "heads": (4, 2, 64)} | FP8,
    "verification, pages of 8 bits": SINKS_AND_ALL
    | {"lens": [70, 12, 300], "heads": (4, 1, 64), "num_queries": 5, "has_alibi": False, "kv_dtype": jnp.float8_e5m2},
    "head_dim 512": {"lens": [70, 0, 300, 5], "heads": (4, 2, 512)},
    "head_dim 320, verification": SINKS_AND_ALL
    | {"lens": [70, 12, 300], "heads": (6, 2, 320), "num_queries": 3, "dtype": jnp.float16},
    "head_dim 512, pages of 8 bits": {"lens": [70, 0, 300, 5], "heads": (8, 2, 512)} | FP8,
}


def small_config(heads, *, kv_dtype=None, streams=1, **_):
    """Three blocks, with as few slots as they may have, but for one ring, in which three move by one in a turn."""
    has_one_ring = heads[2] > 256 and kv_dtype is None
    stages = 3 if has_one_ring else 2
    return Config(block_kv=64, stages=stages, streams=streams, num_ctas=3, has_one_ring=has_one_ring)


@pytest.mark.parametrize("case", quick_first(INTERPRETED))
def test_interpreted(capsys, case):
    arrays, options, want = make_case(**INTERPRETED[case])
    config = small_config(**INTERPRETED[case])
    check(interpret(capsys, paged_attention_sm90, *arrays, **options, config=config, interpret=True), want)


MIX = [5, 64, 1, 300, 0, 1000, 17, 128, 2050]
ON_A_GPU = {
    "llama": {"lens": MIX, "heads": (32, 8, 128)},
    "one long row": {"lens": [9001], "heads": (32, 8, 128)},
    "one long row among short ones": {"lens": [*range(1, 100), 30_000], "heads": (8, 2, 64)},
    "mostly nothing": {"lens": [0, 0, 0, 70, 0, 129, 0, 0], "heads": (8, 8, 64)},
    "more rows than CTAs": {"lens": [1 + 37 * i % 211 for i in range(700)], "heads": (4, 4, 64)},
    "pages of 8": {"lens": MIX, "heads": (8, 2, 128), "block_size": 8},
    "pages of 64": {"lens": MIX, "heads": (8, 2, 64), "block_size": 64},
    "pages of 128": {"lens": MIX, "heads": (8, 2, 256), "block_size": 128},
    "head_dim 256": {"lens": MIX, "heads": (16, 4, 256)},
    "head_dim 256, 3 queries": {"lens": [x + 3 for x in MIX], "heads": (16, 8, 256), "num_queries": 3},
    "head_dim 96": {"lens": MIX, "heads": (16, 2, 96), "sliding_window": 100},
    "head_dim 80": {"lens": MIX, "heads": (7, 1, 80), "soft_cap": 5.0},
    "head_dim 160": {"lens": MIX, "heads": (8, 4, 160)},
    "head_dim 512": {"lens": MIX, "heads": (32, 4, 512)},
    "head_dim 512, one long row": {"lens": [9001], "heads": (8, 2, 512)},
    "head_dim 512, 3 queries, sinks": {"lens": [x + 3 for x in MIX], "heads": (20, 4, 512), "num_queries": 3}
    | {"has_sinks": True, "soft_cap": 20.0, "sliding_window": 257},
    "head_dim 384, ALiBi": {"lens": MIX, "heads": (6, 2, 384), "has_alibi": True, "dtype": jnp.float16},
    "head_dim 320, pages of 64": {"lens": MIX, "heads": (8, 1, 320), "block_size": 64},
    "float16": {"lens": MIX, "heads": (16, 2, 128), "dtype": jnp.float16},
    "window": {"lens": MIX, "heads": (16, 2, 128), "sliding_window": 257},
    "sinks": {"lens": MIX, "heads": (64, 8, 64), "has_sinks": True, "sliding_window": 128},
    "ALiBi": {"lens": MIX, "heads": (12, 12, 128), "has_alibi": True},
    "ALiBi, grouped": {"lens": [9001, 3], "heads": (32, 8, 64), "has_alibi": True, "num_queries": 3},
    "71 heads": {"lens": MIX, "heads": (71, 1, 64)},
    **{
        f"{n} queries": {"lens": [x + n for x in MIX], "heads": (32, 4, 128), "num_queries": n}
        | {"has_sinks": True, "soft_cap": 20.0}
        for n in (2, 5, 8)
    },
    "all queries": {"lens": [8, 9, 500], "heads": (64, 1, 128), "num_queries": 8, "sliding_window": 30},
    **{
        f"pages of {dtype.__name__}": {"lens": MIX, "heads": (32, 8, 128), "kv_dtype": dtype}
        for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)
    },
    "FP8, head_dim 64, sinks": {"lens": MIX, "heads": (64, 8, 64), "has_sinks": True} | FP8,
    "FP8, head_dim 256": {"lens": MIX, "heads": (16, 4, 256)} | FP8,
    "FP8, head_dim 256, 24 queries": {"lens": [x + 3 for x in MIX], "heads": (16, 2, 256), "num_queries": 3} | FP8,
    "FP8, head_dim 512": {"lens": MIX, "heads": (32, 4, 512)} | FP8,
    "FP8, head_dim 512, 2 queries": FP8
    | {"lens": [x + 2 for x in MIX], "heads": (16, 2, 512), "num_queries": 2, "sliding_window": 257},
    "INT8, head_dim 384": {"lens": MIX, "heads": (8, 2, 384), "kv_dtype": jnp.int8},
    "FP8, pages of 64": {"lens": MIX, "heads": (8, 2, 128), "block_size": 64} | FP8,
    **{
        f"FP8, {n} queries": FP8
        | {"lens": [x + n for x in MIX], "heads": (32, 8, 128), "num_queries": n}
        | {"sliding_window": 257, "soft_cap": 20.0}
        for n in (3, 5, 8)
    },
}


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("case", ON_A_GPU)
def test_on_a_gpu(case):
    arrays, options, want = make_case(**ON_A_GPU[case])
    room = options.pop("room")
    run = jax.jit(lambda *args, **layout: paged_attention(*args, **layout, room=room, implementation="sm90"))
    first = run(*arrays, **options)
    check(first, want)
    again = run(*arrays, **options)  # the counters of arrivals are back at 0, and sums are added in the same order
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(*(in_float(x[: len(want[0])]) for x in (a, b)))


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("poisoned", ["k", "v"])
def test_a_nan_inside_the_context_shows(poisoned):
    arrays, options, _ = make_case([300, 300], heads=(8, 2, 64))
    block = options["block_tables"][0, 3]
    q, pages = arrays
    pages = pages._replace(**{poisoned: getattr(pages, poisoned).at[block, 1, 2].set(jnp.nan)})
    got, _ = paged_attention(q, pages, **options, implementation="sm90")
    is_nan = np.isnan(np.asarray(got.astype(jnp.float32))).all(axis=-1)
    np.testing.assert_array_equal(is_nan[:2, 0], [[False] * 4 + [True] * 4, [False] * 8])


@functools.cache
def compiled(
    heads,
    *,
    num_layers=1,
    num_rows=64,
    num_queries=1,
    block_size=16,
    dtype=jnp.bfloat16,
    kv_dtype=None,
    **options,
):
    pools = [shapes_of_pages(heads, block_size=block_size, dtype=kv_dtype or dtype)] * num_layers
    q = jax.ShapeDtypeStruct((num_rows, num_queries, heads[0], heads[2]), dtype)
    tables = jax.ShapeDtypeStruct((num_rows, 512), jnp.int32)
    layout = {"block_tables": tables, "seq_lens": jax.ShapeDtypeStruct((num_rows,), jnp.int32)}
    layout["scores"] = shapes_of_scores(heads[0], **options)

    def layers(q, pools, layout):
        for pages in pools:
            q, _ = paged_attention(q, pages, **layout, implementation="sm90")
        return q

    return compile_for_h200(layers, q, pools, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        {"heads": (32, 8, 128)},
        {"heads": (32, 8, 128), "num_queries": 4},
        {"heads": (16, 8, 256)},
        {"heads": (16, 8, 256), "num_queries": 3, "soft_cap": 30.0},
        {"heads": (32, 8, 128), "num_queries": 3, "sliding_window": 200, "soft_cap": 30.0},
        {"heads": (32, 32, 128), "has_alibi": True},
        {"heads": (32, 8, 128)} | FP8,
        {"heads": (32, 8, 128), "kv_dtype": jnp.int8, "num_queries": 3, "sliding_window": 200, "soft_cap": 30.0},
        {"heads": (8, 8, 80), "block_size": 128, "sliding_window": 100, "soft_cap": 30.0},
        {"heads": (32, 4, 512)},
        {"heads": (8, 1, 512), "num_queries": 2, "sliding_window": 200, "soft_cap": 30.0},
        {"heads": (6, 2, 384), "has_alibi": True},
    ],
    ids=str,
)
def test_compiles_without_spilling(case):
    program = compiled(**case)
    [kernel] = program.kernels
    assert kernel.spill_bytes == 0
    assert program.temp_bytes < 9 * 2**20  # two parts a CTA, at most 16 rows of 512


@pytest.mark.slow
def test_layers_share_the_plan():
    one, two = compiled(heads=(32, 8, 128)), compiled(heads=(32, 8, 128), num_layers=2)
    assert two.num_launches == one.num_launches + 1
    assert two.thunks == {"kCommandBuffer": 1}


LENGTHS = {
    "nothing": [0] * 5,
    "one short": [160],
    "one long": [8192],
    "equal": [1152] * 64,
    "short": [512] * 16,
    "a few": [4096] * 8,
    "one among many": [100_000] + [50] * 30,
    "random": [1 + 7919 * i % 3000 if i % 5 else 0 for i in range(100)],
}


@functools.partial(jax.jit, static_argnames=("num_splits", "sliding_window"))
def plan_of(seq_lens, *, num_splits, sliding_window):
    return make_plan(
        seq_lens,
        jnp.ones_like(seq_lens),
        num_tiles=8,
        num_splits=num_splits,
        block_kv=64,
        sliding_window=sliding_window,
    )


@pytest.mark.parametrize("lens", LENGTHS)
@pytest.mark.parametrize(("num_splits", "sliding_window"), quick_first([(7, 500), (132, None)]))
def test_splits_hold_every_block_once_and_know_of_each_other(lens, num_splits, sliding_window):
    lens = np.array(LENGTHS[lens], np.int32)
    plan = plan_of(jnp.asarray(lens), num_splits=num_splits, sliding_window=sliding_window)
    first = np.maximum(lens - (sliding_window or 2**30), 0) // 64
    blocks = np.repeat(-(-lens // 64) - first, 8)
    costs = BLOCK_COST * blocks + TILE_COST
    tile_begins = np.cumsum(costs) - costs
    done = [[] for _ in blocks]
    waiting, arrived = {}, {}
    splits = np.asarray(plan.splits).tolist()
    assert [split[3] for split in splits[1:]] + [costs.sum()] == [split[4] for split in splits]
    for number, (row, tile, tile_begin, begin, end, owner, part_index, num_others) in enumerate(splits):
        index = row * 8 + tile
        while tile_begin < end:
            assert tile_begin == tile_begins[index]
            part = range(*(min(max(-(-(x - tile_begin) // BLOCK_COST), 0), blocks[index]) for x in (begin, end)))
            done[index] += part
            if tile_begin < begin and part:
                arrived.setdefault((owner, index), []).append(part_index)
            elif tile_begin >= begin and len(part) < blocks[index]:
                waiting[number, index] = list(range(number + 1, number + 1 + num_others))
            tile_begin += costs[index]
            index += 1
    assert done == [list(range(n)) for n in blocks]
    assert arrived == waiting
    assert not np.asarray(plan.arrivals).any()
    sizes = [split[4] - split[3] for split in splits]
    assert max(sizes) <= max(-(-costs.sum() // num_splits), MIN_PART) + CUT_COST


def test_tiles_are_not_cut_where_that_gains_nothing():
    for lens, num_cuts in [([160], 0), ([512] * 16, 0), ([4096] * 8, 64), ([8192], 8 * 15)]:
        plan = plan_of(jnp.array(lens, jnp.int32), num_splits=132, sliding_window=None)
        assert plan.splits[:, 7].sum() == num_cuts


def test_refuses_with_a_reason():
    arrays, options, _ = make_case([20], heads=(4, 2, 64))
    unchecked = inspect.unwrap(paged_attention_sm90)
    with pytest.raises(NotImplementedError, match="all be bfloat16 or all float16, got float32, bfloat16"):
        unchecked(arrays[0].astype(jnp.float32), *arrays[1:], **options)
    for heads, block_size, message in [
        ((4, 2, 72), 16, "head_dim must be a multiple of 16 up to 256, or of 64 up to 512, got 72"),
        ((4, 2, 288), 16, "up to 512, got 288"),
        ((4, 2, 576), 16, "up to 512, got 576"),
        ((34, 2, 512), 16, "at most 16 queries of a KV head in heads of more than 256, got 17"),
        ((4, 2, 64), 4, "block size must be a power of two from 8 to 256, got 4"),
    ]:
        arrays, options, _ = make_case([20], heads=heads, block_size=block_size)
        with pytest.raises(NotImplementedError, match=message):
            paged_attention_sm90(*arrays, **options)
