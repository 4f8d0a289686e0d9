"""The Hopper kernel of latent attention: interpreted on a CPU with race detection, compiled for an H200 without one,
and run on one if there is one; always with NaN in everything outside the contexts.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from interpreting import interpret
from latent_cases import check, make_case

from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.latent_attention import latent_attention
from pallas_kernels.latent_attention.plan import BLOCK_COST, BLOCK_KV, CUT_COST, ROWS, TILE_COST, make_plan
from pallas_kernels.latent_attention.sm90 import Config, latent_attention_sm90
from pallas_kernels.paging import Pages

# Splits with several tiles, and tiles of which several splits have parts; tiles of many tokens, of one and of parts of
# one; contexts that end within a page; tokens of no row.
INTERPRETED = {
    "decode": {"chunks": [(1, 70), (1, 300), (1, 5)], "heads": 4, "sizes": (128, 32), "num_tokens": 5, "max_rows": 5},
    "chunks": {"chunks": [(1, 9), (1, 200), (40, 150), (3, 3)], "heads": 3, "sizes": (128, 64), "num_tokens": 60},
    "many heads": {"chunks": [(2, 130)], "heads": 96, "sizes": (256, 64), "block_size": 128, "dtype": jnp.float16},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", INTERPRETED)
def test_interpreted(capsys, case):
    arrays, layout, options, want = make_case(**INTERPRETED[case])
    config = Config(stages=2, min_blocks=1, num_ctas=3)
    run = functools.partial(latent_attention_sm90, **layout, **options, config=config, interpret=True)
    check(interpret(capsys, run, *arrays), want)


LITE = {"heads": 16, "sizes": (512, 64)}
MIX = [(1, 1), (1, 64), (1, 333), (5, 5), (70, 150), (3, 260), (200, 777), (64, 64), (65, 65), (130, 1000), (33, 100)]
DECODES = [(1, n) for n in (5, 64, 1, 300, 1000, 17, 128, 2050)]
ON_A_GPU = {
    "decode": {"chunks": DECODES, **LITE},
    "decode, padded": {"chunks": DECODES, **LITE, "num_tokens": 16, "max_rows": 16},
    "decode, 128 heads": {"chunks": DECODES, "heads": 128, "sizes": (512, 64)},
    "decode, 8 heads": {"chunks": DECODES, "heads": 8, "sizes": (512, 64)},
    "one long row": {"chunks": [(1, 9001)], **LITE},
    "one long row, 128 heads": {"chunks": [(1, 9001)], "heads": 128, "sizes": (512, 64)},
    "one long row among short ones": {"chunks": [(1, n) for n in (*range(1, 40), 4_000)], **LITE},
    "more rows than thread blocks": {"chunks": [(1, 1 + 37 * i % 211) for i in range(700)], **LITE},
    "mix": {"chunks": MIX, **LITE, "num_tokens": 768, "max_rows": 20},
    "mix, 128 heads": {"chunks": MIX, "heads": 128, "sizes": (512, 64)},
    "mix, 5 heads": {"chunks": MIX, "heads": 5, "sizes": (512, 64)},
    "one prompt": {"chunks": [(900, 900)], **LITE},
    "end of a long context": {"chunks": [(100, 9001)], **LITE},
    "nothing": {"chunks": [], **LITE, "num_tokens": 100, "max_rows": 4},
    "one token": {"chunks": [(1, 70)], "heads": 3, "sizes": (512, 64)},
    "pages of 8": {"chunks": MIX, **LITE, "block_size": 8},
    "pages of 64": {"chunks": MIX, **LITE, "block_size": 64},
    "pages of 256": {"chunks": MIX, **LITE, "block_size": 256},
    "a latent of 256": {"chunks": MIX, "heads": 40, "sizes": (256, 32)},
    "a latent of 384": {"chunks": MIX, "heads": 24, "sizes": (384, 64)},
    "a latent of 128": {"chunks": MIX, "heads": 12, "sizes": (128, 64)},
    "float16": {"chunks": MIX, **LITE, "dtype": jnp.float16},
}


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("case", ON_A_GPU)
def test_on_a_gpu(case):
    for seed in range(2):
        arrays, layout, options, want = make_case(**ON_A_GPU[case], seed=seed)
        run = jax.jit(functools.partial(latent_attention, **options, implementation="sm90"))
        first = run(*arrays, **layout)
        check(first, want)
        again = run(*arrays, **layout)  # sums are added in the same order
        np.testing.assert_array_equal(*(np.asarray(x.astype(jnp.float32)) for x in (first, again)))


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("column", [3, 300, 520], ids=["left", "right", "rotated key"])
def test_a_nan_inside_the_context_shows(column):
    arrays, layout, options, _ = make_case([(100, 300), (100, 300)], **LITE)
    block = layout["block_tables"][0, 3]
    arrays = arrays[0], arrays[1].at[block, 0, 2, column].set(jnp.nan)
    got = latent_attention(*arrays, **layout, **options, implementation="sm90")
    is_nan = np.isnan(np.asarray(got.astype(jnp.float32)))
    assert is_nan[:100].any(axis=2).all()
    assert not is_nan[100:].any()


@functools.cache
def compiled(heads, sizes, *, num_layers=1, num_tokens=64, num_rows=64, block_size=16, dtype=jnp.bfloat16):
    size = sum(sizes)
    q = jax.ShapeDtypeStruct((num_tokens, heads, size), dtype)
    pools = [jax.ShapeDtypeStruct((1024, 1, block_size, size), dtype)] * num_layers
    shapes = {
        "block_tables": (num_rows, 512),
        "seq_lens": (num_rows,),
        "query_starts": (num_rows + 1,),
        "num_decode_rows": (),
        "num_rows": (),
    }
    layout = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
    options = {"latent_size": sizes[0], "scale": 0.1, "is_decode_only": num_tokens == num_rows}

    def layers(q, pools, layout):
        for pool in pools:
            out = latent_attention(q, Pages(pool, pool), **layout, **options, implementation="sm90")
            q = jnp.concatenate([out, q[..., sizes[0] :]], axis=-1)
        return q

    return compile_for_h200(layers, q, pools, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        LITE,
        {"heads": 128, "sizes": (512, 64), "num_tokens": 512, "num_rows": 16},
        {"heads": 5, "sizes": (512, 64), "block_size": 8, "dtype": jnp.float16},
        {"heads": 40, "sizes": (256, 32), "num_tokens": 512, "num_rows": 16, "block_size": 256},
    ],
    ids=str,
)
def test_compiles_without_spilling(case):
    program = compiled(**case)
    assert len(program.kernels) == 2
    assert program.spill_bytes == 0
    num_tokens, num_rows = case.get("num_tokens", 64), case.get("num_rows", 64)
    # Two parts of tiles for each CTA, of which those in use are written; and the result.
    part_rows = min(64, case["heads"]) if num_tokens == num_rows else 64
    room = 264 * part_rows * 4 + num_tokens * case["heads"] * 2
    assert program.temp_bytes < 2**20 + room * case["sizes"][0]


@pytest.mark.slow
def test_layers_share_the_plan():
    one, two = compiled(**LITE), compiled(**LITE, num_layers=2)
    assert two.num_launches == one.num_launches + 3  # two kernels, and the next queries
    assert two.thunks == {"kCommandBuffer": 1}


PLANNED = {
    "nothing": [],
    "one short": [(1, 160)],
    "one long": [(1, 8192)],
    "equal": [(1, 1152)] * 64,
    "one among many": [(1, 50)] * 30 + [(1, 100_000)],
    "random": [(1, 1 + 7919 * i % 3000) for i in range(30)] + [(2 + 31 * i % 90, 100 + 97 * i % 900) for i in range(9)],
    "a prompt": [(777, 777)],
}


@functools.partial(jax.jit, static_argnames=("num_tokens", "num_heads", "num_splits"))
def plan_of(seq_lens, query_starts, num_rows, *, num_tokens, num_heads, num_splits):
    return make_plan(
        seq_lens,
        query_starts,
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_splits=num_splits,
        min_blocks=3,
    )


@pytest.mark.parametrize("case", quick_first(PLANNED, 2))
@pytest.mark.parametrize(("num_heads", "num_splits"), quick_first([(24, 7), (16, 132), (128, 132)]))
def test_splits_hold_every_block_once_and_cuts_know_their_parts(case, num_heads, num_splits):
    chunks = PLANNED[case]
    counts, lens = ([chunk[i] for chunk in chunks] + [0, 0] for i in (0, 1))
    starts = np.cumsum([0, *counts])
    num_tokens = int(starts[-1]) + 5
    plan = plan_of(
        jnp.asarray(lens, jnp.int32),
        jnp.asarray(starts, jnp.int32),
        jnp.int32(len(chunks)),
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_splits=num_splits,
    )
    tiles, splits, cuts = (type(part)(*(np.asarray(field).tolist() for field in part)) for part in plan)
    num_tiles = sum(size > 0 for size in tiles.num_queries)
    query = 0
    for i in range(num_tiles):
        assert tiles.query[i] == query
        query += tiles.num_queries[i]
        assert tiles.num_queries[i] <= ROWS
        token, last_token = tiles.query[i] // num_heads, (query - 1) // num_heads
        if token >= starts[-1]:
            assert tiles.end[i] == 0
            continue
        row = tiles.row[i]
        assert starts[row] <= token <= last_token < starts[row + 1]
        assert tiles.context[i] == lens[row]
        before = lens[row] - counts[row] - starts[row]
        assert (tiles.seen[i], tiles.end[i]) == (before + token + 1, before + last_token + 1)
    assert query == num_tokens * num_heads

    blocks = [-(-end // BLOCK_KV) for end in tiles.end]
    done = [[] for _ in range(num_tiles)]
    parts, whole = {}, []
    for split in range(num_splits):
        begin, end, first, count, part_index = (field[split] for field in splits)
        assert begin == (0 if split == 0 else splits.end[split - 1])
        for i in range(first, first + count):
            part = range(*(min(max(-(-(x - tiles.unit[i]) // BLOCK_COST), 0), blocks[i]) for x in (begin, end)))
            done[i] += part
            is_begun = tiles.unit[i] >= begin
            if is_begun and len(part) == blocks[i]:
                whole.append(i)
            elif is_begun or part:
                parts.setdefault(i, []).append(num_splits + split if is_begun else part_index)
    assert done == [list(range(blocks[i])) for i in range(num_tiles)]
    assert sorted([*whole, *parts]) == list(range(num_tiles))
    merged = {}
    for query, num_queries, split, num_others, num_cuts in zip(*cuts, strict=True):
        assert num_cuts == len(parts)
        if num_queries:
            i = tiles.query.index(query)
            assert num_queries == tiles.num_queries[i]
            merged[i] = [num_splits + split, *range(split + 1, split + 1 + num_others)]
    assert merged == parts
    total = sum(BLOCK_COST * blocks[i] + TILE_COST for i in range(num_tiles))
    sizes = [end - begin for begin, end in zip(splits.begin, splits.end, strict=True)]
    assert max(sizes) <= max(-(-total // num_splits), 3 * BLOCK_COST) + CUT_COST


def test_refuses_with_a_reason():
    arrays, layout, options, _ = make_case([(1, 20)], heads=4, sizes=(128, 64))
    unchecked = inspect.unwrap(latent_attention_sm90)
    with pytest.raises(NotImplementedError, match="both be bfloat16 or both float16, got float32 and bfloat16"):
        unchecked(arrays[0].astype(jnp.float32), arrays[1], **layout, **options)
    with pytest.raises(NotImplementedError, match="scale must be positive"):
        latent_attention_sm90(*arrays, **layout, **options | {"scale": 0.0})
    with pytest.raises(ValueError, match="latent_size must be from 1 to 192, the size of a position's vector, got 193"):
        latent_attention(*arrays, **layout, **options | {"latent_size": 193})
    for sizes, block_size, message in [
        ((192, 64), 16, r"kv_lora_rank\) must be a multiple of 128 up to 512, got 192"),
        ((640, 64), 16, "up to 512, got 640"),
        ((128, 16), 16, r"qk_rope_head_dim\) must be 32 or 64, got 16"),
        ((128, 64), 4, "block size must be a power of two from 8 to 256, got 4"),
    ]:
        arrays, layout, options, _ = make_case([(1, 20)], heads=4, sizes=sizes, block_size=block_size)
        with pytest.raises(NotImplementedError, match=message):
            latent_attention_sm90(*arrays, **layout, **options)
