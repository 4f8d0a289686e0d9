"""The Hopper kernel of ragged prefill attention: interpreted on a CPU with race detection, compiled for an H200 without
one, and run on one if there is one; always with NaN in everything outside the contexts.
"""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_ragged_prefill_attention as of_chunks
from interpreting import interpret
from kernel_results import check_tokens
from poisoned_pages import make_scores, shapes_of_pages, shapes_of_scores
from rounded_pages import rounded_pages

from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.paging import MAX_HEAD_DIM, Scores
from pallas_kernels.ragged_prefill_attention import ragged_prefill_attention, sm90
from pallas_kernels.ragged_prefill_attention.plan import plan
from pallas_kernels.ragged_prefill_attention.sm90 import Config, heuristic, ragged_prefill_attention_sm90

# Relative to the norm of the result. A weight is rounded to the pages' dtype, and so is the result: 8 bits and 11 bits.
TOLERANCE = {jnp.bfloat16: 2.5e-3, jnp.float16: 4e-4}


def make_case(
    chunks,
    *,
    heads,
    num_tokens=None,
    num_skipped=0,
    max_rows=None,
    block_size=16,
    dtype=jnp.bfloat16,
    kv_dtype=None,
    **options,
):
    """Return the arguments of `ragged_prefill_attention`, arrays and then the others, and the expected result."""
    rng = np.random.default_rng(len(chunks) + sum(context for _, context in chunks))
    arrays, layout = of_chunks.make_case(
        rng,
        chunks,
        num_skipped=num_skipped,
        num_tokens=num_tokens,
        max_rows=max_rows,
        max_blocks=None,
        heads=heads,
        block_size=block_size,
        dtype=dtype,
    )
    if kv_dtype is not None:
        q, pages, before = arrays
        arrays = q, rounded_pages(pages, kv_dtype), before
    scores = make_scores(rng, heads[0], **{"scale": heads[2] ** -0.5} | options)
    want = of_chunks.expected(arrays, layout, scores)
    return arrays, layout | {"scores": jax.tree.map(jnp.asarray, scores)}, want


def check(got, want, *, factor=1):
    check_tokens(got, want, factor * TOLERANCE[got.dtype.type])


# Two sets of heads or tokens a tile; tiles of a row, of parts of rows, of no row; a context that ends within a page.
INTERPRETED = {
    "pairs of heads": {"chunks": [(5, 5), (70, 150), (3, 260)], "heads": (4, 2, 64)}
    | {"num_tokens": 96, "num_skipped": 2, "max_rows": 6},
    "window": {"chunks": [(70, 190), (3, 50)], "heads": (4, 2, 16), "has_sinks": True, "sliding_window": 90},
    "runs of tokens": {"chunks": [(130, 140), (2, 300)], "heads": (1, 1, 32)}
    | {"has_sinks": True, "has_alibi": True, "sliding_window": 90},
    "cap": {"chunks": [(20, 200)], "heads": (2, 1, 16), "block_size": 256, "dtype": jnp.float16}
    | {"has_alibi": True, "soft_cap": 4.0},
    "Gemma 2": {"chunks": [(70, 150)], "heads": (2, 1, 256), "sliding_window": 90, "soft_cap": 4.0},
    "no tile": {"chunks": [], "heads": (2, 1, 16), "num_tokens": 2, "num_skipped": 2},
    "head_dim 512": {"chunks": [(5, 5), (70, 150), (3, 100)], "heads": (2, 1, 512)}
    | {"num_tokens": 90, "num_skipped": 2, "max_rows": 6},
    "head_dim 384": {"chunks": [(130, 150)], "heads": (1, 1, 384), "block_size": 8}
    | {"has_sinks": True, "has_alibi": True, "sliding_window": 40, "soft_cap": 4.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", INTERPRETED)
def test_interpreted(capsys, case):
    arrays, layout, want = make_case(**INTERPRETED[case])
    block_kv = 64 if case in ("runs of tokens", "Gemma 2") else 128
    q_slots = 1 if case in ("cap", "Gemma 2") else 2
    config = Config(block_kv=block_kv, k_stages=3, v_stages=2, q_slots=q_slots, num_ctas=2)
    head_dim = arrays[0].shape[2]
    if head_dim > MAX_HEAD_DIM:  # two pairs
        config = dataclasses.replace(heuristic(head_dim), num_ctas=4)
    run = functools.partial(ragged_prefill_attention_sm90, **layout, config=config, interpret=True)
    check(interpret(capsys, run, *arrays), want)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 512])
def test_interpreted_with_pages_of_8_bits(capsys, monkeypatch, head_dim):
    """Those of the first two rows are converted at once; for the last row there is no room."""
    monkeypatch.setattr(sm90, "FEWEST_TOKENS_TO_CONVERT_FOR", 1)
    monkeypatch.setattr(sm90, "CONVERTED_PER_TOKEN", 2)
    monkeypatch.setattr(sm90, "FEWEST_CONVERTED_FOR_LARGE_HEADS", 1)
    case = INTERPRETED["pairs of heads"] | {"heads": (4, 2, head_dim), "kv_dtype": jnp.float8_e4m3fn}
    (q, pages, before), layout, want = make_case(**case)
    arguments = pages, q.dtype, *(layout[name] for name in ("block_tables", "seq_lens", "first_row", "num_rows"))
    _, _, end = sm90._converted(*arguments, num_tokens=2 * len(q))
    assert end == layout["first_row"] + 2 == layout["num_rows"] - 1
    config = Config(block_kv=64, k_stages=3, v_stages=2, q_slots=1, num_ctas=4)
    run = functools.partial(ragged_prefill_attention_sm90, **layout, config=config, interpret=True)
    check(interpret(capsys, run, q, pages, before), want, factor=2)


MIX = [(5, 5), (70, 150), (3, 260), (1, 1), (200, 777), (64, 64), (65, 65), (130, 1000), (129, 129), (33, 100)]
FP8 = {"kv_dtype": jnp.float8_e4m3fn}
ON_A_GPU = {
    "llama": {"chunks": MIX, "heads": (32, 8, 128), "num_tokens": 768, "num_skipped": 3, "max_rows": 20},
    "one long row": {"chunks": [(2000, 2000)], "heads": (4, 1, 128)},
    "end of a long context": {"chunks": [(300, 20_001)], "heads": (8, 2, 64)},
    "many short rows": {"chunks": [(1 + 5 * i % 13, 20 + i) for i in range(300)], "heads": (4, 2, 64)},
    "nothing": {"chunks": [], "heads": (4, 2, 64), "num_tokens": 100, "num_skipped": 2},
    "no tile": {"chunks": [], "heads": (4, 2, 64), "num_tokens": 2, "num_skipped": 2},
    "fewer tokens than a tile": {"chunks": [(9, 30)], "heads": (4, 2, 64)},
    "a head for each": {"chunks": MIX, "heads": (8, 8, 128)},
    "three share": {"chunks": MIX, "heads": (6, 2, 64), "sliding_window": 70},
    "pages of 8": {"chunks": MIX, "heads": (8, 2, 128), "block_size": 8},
    "pages of 64": {"chunks": MIX, "heads": (8, 2, 64), "block_size": 64},
    "pages of 256": {"chunks": MIX, "heads": (8, 2, 128), "block_size": 256},
    "head_dim 256": {"chunks": MIX, "heads": (16, 4, 256), "block_size": 128},
    "head_dim 256, alone": {"chunks": MIX, "heads": (3, 3, 256), "sliding_window": 200, "soft_cap": 30.0},
    "Gemma 2": {"chunks": MIX, "heads": (16, 8, 256), "sliding_window": 200, "soft_cap": 30.0},
    "head_dim 384": {"chunks": MIX, "heads": (8, 2, 384), "sliding_window": 200, "soft_cap": 30.0},
    "head_dim 384, alone": {"chunks": MIX, "heads": (3, 3, 384), "has_sinks": True, "block_size": 64},
    "head_dim 512": {"chunks": MIX, "heads": (32, 4, 512), "num_tokens": 768, "num_skipped": 3, "max_rows": 20},
    "head_dim 512, alone": {"chunks": MIX, "heads": (1, 1, 512), "sliding_window": 100, "soft_cap": 30.0},
    "head_dim 512, ALiBi": {"chunks": MIX, "heads": (8, 2, 512), "has_alibi": True, "dtype": jnp.float16},
    "head_dim 512, end of a long context": {"chunks": [(300, 20_001)], "heads": (16, 2, 512)},
    "head_dim 512, one long row": {"chunks": [(2000, 2000)], "heads": (4, 2, 512), "block_size": 256},
    "head_dim 512, many short rows": {"chunks": [(1 + 5 * i % 13, 20 + i) for i in range(300)], "heads": (8, 2, 512)},
    "head_dim 512, pages of 8": {"chunks": MIX, "heads": (4, 2, 512), "block_size": 8},
    "head_dim 512, nothing": {"chunks": [], "heads": (4, 2, 512), "num_tokens": 100, "num_skipped": 2},
    "head_dim 96": {"chunks": MIX, "heads": (16, 2, 96), "sliding_window": 100},
    "head_dim 80": {"chunks": MIX, "heads": (7, 1, 80), "soft_cap": 5.0},
    "float16": {"chunks": MIX, "heads": (16, 2, 128), "dtype": jnp.float16},
    "window": {"chunks": MIX, "heads": (16, 2, 128), "sliding_window": 257},
    "ALiBi": {"chunks": MIX, "heads": (12, 12, 128), "has_alibi": True},
    "ALiBi, odd": {"chunks": MIX, "heads": (3, 1, 64), "has_alibi": True, "sliding_window": 150, "soft_cap": 5.0},
    "sinks": {"chunks": MIX, "heads": (64, 8, 64), "has_sinks": True, "sliding_window": 128},
    "8 bits": {"chunks": MIX, "heads": (32, 8, 128), "num_tokens": 1100, "num_skipped": 3, "max_rows": 20} | FP8,
    "8 bits, no room for the last": {"chunks": [(300, 300), (600, 3000), (200, 9000)], "heads": (8, 2, 64)} | FP8,
    "8 bits, head_dim 512": {"chunks": MIX, "heads": (32, 4, 512), "num_tokens": 768, "num_skipped": 3} | FP8,
    "8 bits, head_dim 512, no room": {"chunks": [(60, 60), (9, 9000), (5, 70)], "heads": (8, 2, 512)} | FP8,
    "8 bits, few tokens": {"chunks": MIX, "heads": (8, 2, 128), "sliding_window": 200} | FP8,
}


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("case", ON_A_GPU)
def test_on_a_gpu(case):
    arrays, layout, want = make_case(**ON_A_GPU[case])
    run = jax.jit(lambda *args, **layout: ragged_prefill_attention(*args, **layout, implementation="sm90"))
    check(run(*arrays, **layout), want, factor=2 if "kv_dtype" in ON_A_GPU[case] else 1)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("head_dim", [64, 512])
@pytest.mark.parametrize("poisoned", ["k", "v"])
def test_a_nan_inside_the_context_shows(poisoned, head_dim):
    arrays, layout, _ = make_case([(100, 300), (100, 300)], heads=(8, 2, head_dim))
    block = layout["block_tables"][0, 3]
    q, pages, *rest = arrays
    pages = pages._replace(**{poisoned: getattr(pages, poisoned).at[block, 1, 2].set(jnp.nan)})
    got = ragged_prefill_attention(q, pages, *rest, **layout, implementation="sm90")
    is_nan = np.isnan(np.asarray(got.astype(jnp.float32))).all(axis=-1)
    np.testing.assert_array_equal(is_nan[:100], [[False] * 4 + [True] * 4] * 100)
    assert not is_nan[100:].any()


@functools.cache
def compiled(
    heads,
    *,
    num_layers=1,
    num_tokens=512,
    num_rows=16,
    block_size=16,
    dtype=jnp.bfloat16,
    kv_dtype=None,
    **options,
):
    pools = [shapes_of_pages(heads, block_size=block_size, dtype=kv_dtype or dtype)] * num_layers
    q = jax.ShapeDtypeStruct((num_tokens, heads[0], heads[2]), dtype)
    shapes = {
        "block_tables": (num_rows, 512),
        "seq_lens": (num_rows,),
        "query_starts": (num_rows + 1,),
        "first_row": (),
        "num_rows": (),
    }
    layout = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
    layout["scores"] = shapes_of_scores(heads[0], **options)

    def layers(q, pools, out, layout):
        for pages in pools:
            pages, out = jax.lax.optimization_barrier((pages, out))  # as a layer writes into its pages first
            out = ragged_prefill_attention(q, pages, out, **layout, implementation="sm90")
        return out

    return compile_for_h200(layers, q, pools, q, layout, donate_argnums=(2,))


COMPILED: dict[str, dict[str, Any]] = {
    "plain": {"heads": (32, 8, 128)},
    "window": {"heads": (6, 2, 64), "sliding_window": 70},
    "window and cap": {"heads": (16, 2, 128), "sliding_window": 257, "soft_cap": 30.0},
    "ALiBi": {"heads": (32, 8, 128), "has_alibi": True},
    "pages of 8": {"heads": (32, 8, 128), "block_size": 8},
    "head_dim 80, window": {"heads": (16, 8, 80), "sliding_window": 200},
    "head_dim 96, window and cap": {"heads": (16, 8, 96), "sliding_window": 200, "soft_cap": 30.0},
    "head_dim 112, window and cap": {"heads": (16, 8, 112), "sliding_window": 200, "soft_cap": 30.0},
    "head_dim 32": {"heads": (8, 2, 32)},
    "head_dim 256": {"heads": (16, 4, 256)},
    "head_dim 384": {"heads": (16, 2, 384), "sliding_window": 200, "soft_cap": 30.0},
    "head_dim 384, an odd number of heads": {"heads": (3, 3, 384), "block_size": 64},
    "head_dim 512": {"heads": (32, 4, 512)},
    "head_dim 512, ALiBi, window and cap": {"heads": (8, 2, 512), "has_alibi": True, "sliding_window": 200}
    | {"soft_cap": 30.0},
    "head_dim 512, pages of 8": {"heads": (16, 2, 512), "block_size": 8},
    "head_dim 512, pages of 256": {"heads": (3, 1, 512), "block_size": 256, "dtype": jnp.float16},
    "Gemma 2": {"heads": (16, 8, 256), "sliding_window": 4096, "soft_cap": 50.0},
    "Gemma 2, pages of 8": {"heads": (8, 4, 256), "block_size": 8, "sliding_window": 4096, "soft_cap": 50.0},
    "Gemma 2, an odd number of heads": {"heads": (3, 3, 256), "sliding_window": 200, "soft_cap": 30.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_compiles_without_spilling(case):
    program = compiled(**COMPILED[case])
    [kernel] = program.kernels
    assert kernel.spill_bytes == 0
    assert program.temp_bytes < 2**20


@pytest.mark.slow
def test_layers_share_the_plan():
    one, two = compiled(heads=(32, 8, 128)), compiled(heads=(32, 8, 128), num_layers=2)
    assert two.num_launches == one.num_launches + 1
    assert not two.copies_of((512, 32, 128))
    assert two.thunks == {"kCommandBuffer": 1}


@pytest.mark.slow
def test_layers_convert_pages_of_8_bits():
    """A layer has its keys and its values converted and calls the kernel twice; layers share the plans."""
    one, two = (compiled(heads=(32, 8, 128), num_tokens=2048, num_layers=number, **FP8) for number in (1, 2))
    assert two.num_launches == one.num_launches + 4
    assert two.thunks == {"kCommandBuffer": 1}
    assert two.spill_bytes == 0
    assert not two.copies_of((2048, 32, 128))
    assert not two.copies_of((1024, 8, 16, 128))
    assert two.temp_bytes < 2 * 4 * 2048 * 8 * 128 * 2 * 1.1


@pytest.mark.parametrize("tile_size", [4, 64])
def test_the_plan_has_each_token_from_the_first_row_on_once(tile_size):
    rng = np.random.default_rng(tile_size)
    max_rows, num_tokens = 11, 400
    make = jax.jit(functools.partial(plan, num_tokens=num_tokens, tile_size=tile_size))
    for num_rows in (0, 1, 2, 9, 11):
        for first_row in {0, num_rows // 2, num_rows}:
            counts = rng.integers(1, 36, num_rows)
            lens = np.pad(counts + rng.integers(0, 90, num_rows), (0, max_rows - num_rows)).astype(np.int32)
            starts = np.pad(np.cumsum([0, *counts]), (0, max_rows - num_rows), mode="edge").astype(np.int32)
            tiles = make(
                jnp.asarray(lens), jnp.asarray(starts), first_row=jnp.int32(first_row), num_rows=jnp.int32(num_rows)
            )
            num_tiles = int(tiles.num_tiles[0])
            assert num_tiles <= len(tiles.end)
            row, token, size, end, context = (np.asarray(field)[:num_tiles] for field in tiles[:-1])
            assert (np.diff(end) <= 0).all()
            owner, position = np.full(num_tokens, -1), np.zeros(num_tokens, int)
            behind = starts[num_rows]
            for r in range(first_row, num_rows):
                owner[starts[r] : starts[r + 1]] = r
                position[starts[r] : starts[r + 1]] = np.arange(lens[r] - counts[r], lens[r])
            seen = np.zeros(num_tokens, int)
            for i in range(num_tiles):
                tokens = np.arange(token[i], token[i] + size[i])
                seen[tokens] += 1
                if end[i] == 0:
                    assert tokens[0] >= behind
                    continue
                assert (owner[tokens] == row[i]).all()
                assert context[i] == lens[row[i]]
                np.testing.assert_array_equal(position[tokens], np.arange(end[i] - size[i], end[i]))
                assert position[tokens[0]] // tile_size == position[tokens[-1]] // tile_size
            np.testing.assert_array_equal(seen, np.arange(num_tokens) >= starts[min(first_row, num_rows)])


def test_refuses_with_a_reason():
    arrays, layout, _ = make_case([(20, 20)], heads=(4, 2, 64))
    unchecked = inspect.unwrap(ragged_prefill_attention_sm90)
    with pytest.raises(NotImplementedError, match="all be bfloat16 or all float16, got float32, bfloat16"):
        unchecked(arrays[0].astype(jnp.float32), *arrays[1:], **layout)
    with pytest.raises(NotImplementedError, match="scale must be positive"):
        ragged_prefill_attention_sm90(*arrays, **layout | {"scores": Scores(scale=0.0)})
    for heads, block_size, message in [
        ((4, 2, 72), 16, "head_dim must be a multiple of 16 up to 256, or of 128 up to 512, in prompts, got 72"),
        ((4, 2, 320), 16, "or of 128 up to 512, in prompts, got 320"),
        ((4, 2, 640), 16, "or of 128 up to 512, in prompts, got 640"),
        ((4, 2, 64), 4, "block size must be a power of two from 8 to 256, got 4"),
    ]:
        arrays, layout, _ = make_case([(20, 20)], heads=heads, block_size=block_size)
        with pytest.raises(NotImplementedError, match=message):
            ragged_prefill_attention_sm90(*arrays, **layout)
