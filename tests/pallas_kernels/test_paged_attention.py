"""The XLA paged attention against its float64 definition: ragged mixes, poisoned pages, every head layout."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.paged_attention import paged_attention, write_kv
from pallas_kernels.paged_attention.reference import paged_attention_reference

TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 2e-2, jnp.float16: 3e-3}


def make_case(
    rng, *, decodes, prefills, num_tokens, max_rows, max_blocks, heads=(4, 2, 16), block_size=4, dtype=jnp.float32
):
    """Arrays of a step: `decodes` are context lengths, `prefills` (new tokens, context length) pairs.

    Everything outside the contexts is NaN, and their blocks lie scattered over the pool.
    """
    num_heads, num_kv_heads, head_dim = heads
    lens = list(decodes) + [context for _, context in prefills]
    counts = [1] * len(decodes) + [new for new, _ in prefills]
    num_blocks = max_rows * max_blocks + 1
    free = list(rng.permutation(num_blocks))
    k, v = (np.full((num_blocks, num_kv_heads, block_size, head_dim), np.nan, np.float32) for _ in range(2))
    tables = np.zeros((max_rows, max_blocks), np.int32)
    for row, length in enumerate(lens):
        for position in range(length):
            if position % block_size == 0:
                tables[row, position // block_size] = free.pop()
            block = tables[row, position // block_size]
            k[block, :, position % block_size] = rng.standard_normal((num_kv_heads, head_dim))
            v[block, :, position % block_size] = rng.standard_normal((num_kv_heads, head_dim))
    query_starts = np.full(max_rows + 1, sum(counts), np.int32)
    query_starts[: len(lens) + 1] = np.cumsum([0, *counts])
    q = rng.standard_normal((num_tokens, num_heads, head_dim)).astype(np.float32)
    q[sum(counts) :] = np.nan
    arrays = tuple(jnp.asarray(x).astype(dtype) for x in (q, k, v))
    layout = {
        "block_tables": jnp.asarray(tables),
        "seq_lens": jnp.asarray(np.pad(np.array(lens, np.int32), (0, max_rows - len(lens)))),
        "query_starts": jnp.asarray(query_starts),
        "num_decode_rows": jnp.int32(len(decodes)),
        "num_rows": jnp.int32(len(lens)),
    }
    return arrays, layout


def expected(arrays, layout, **options):
    arrays = [np.asarray(x.astype(jnp.float32)) for x in arrays]
    layout = {name: np.asarray(x) for name, x in layout.items() if name != "num_decode_rows"}
    layout["num_rows"] = int(layout["num_rows"])
    return paged_attention_reference(*arrays, **layout, **options)


attend = jax.jit(paged_attention, static_argnames=("scale", "sliding_window", "soft_cap", "implementation"))


def check(arrays, layout, **options):
    got = attend(*arrays, **layout, **options)
    assert got.dtype == arrays[0].dtype
    tolerance = TOLERANCE[arrays[0].dtype.type]
    np.testing.assert_allclose(
        np.asarray(got.astype(jnp.float32)), expected(arrays, layout, **options), atol=tolerance, rtol=tolerance
    )


MIXES = {
    "nothing": ([], []),
    "one decode": ([7], []),
    "first token": ([1], []),
    "decodes": ([1, 33, 64, 2, 17, 5, 5, 9, 30, 64, 12], []),
    "one prompt": ([], [(20, 20)]),
    "whole budget": ([], [(64, 64)]),
    "chunk of a prompt": ([], [(13, 60)]),
    "two-token row": ([], [(2, 2), (2, 40)]),
    "mixed": ([5, 64, 1], [(11, 11), (9, 50), (2, 3)]),
    "full rows": ([3] * 14, [(2, 64), (40, 41)]),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 7}, {"soft_cap": 1.5, "sliding_window": 1}], ids=["plain", "window", "cap"]
)
def test_matches_the_definition(mix, options):
    decodes, prefills = MIXES[mix]
    arrays, layout = make_case(
        np.random.default_rng(0), decodes=decodes, prefills=prefills, num_tokens=64, max_rows=16, max_blocks=16
    )
    check(arrays, layout, scale=0.3, **options)


HEADS = [(1, 1, 1), (3, 1, 5), (4, 4, 8), (6, 2, 7), (10, 2, 33), (14, 2, 64)]


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [*((heads, jnp.float32) for heads in HEADS), ((6, 2, 7), jnp.bfloat16), ((6, 2, 7), jnp.float16)],
)
def test_head_layouts_and_dtypes(heads, dtype):
    arrays, layout = make_case(
        np.random.default_rng(1),
        decodes=[9, 1, 20],
        prefills=[(7, 19), (3, 3)],
        num_tokens=16,
        max_rows=6,
        max_blocks=5,
        heads=heads,
        dtype=dtype,
    )
    check(arrays, layout, scale=heads[2] ** -0.5)


@pytest.mark.parametrize("block_size", [1, 2, 16, 64, 512])
def test_block_sizes(block_size):
    rng = np.random.default_rng(2)
    arrays, layout = make_case(
        rng,
        decodes=[1, 300, 129, 64],
        prefills=[(5, 260), (90, 97)],
        num_tokens=100,
        max_rows=7,
        max_blocks=-(-300 // block_size),
        heads=(2, 1, 8),
        block_size=block_size,
    )
    check(arrays, layout, scale=0.5, sliding_window=270)


@pytest.mark.parametrize("max_rows", [1, 2, 9, 33])
def test_random_steps(max_rows):
    """Random row mixes at one shape a case, more rows than a group and longer than a chunk."""
    rng = np.random.default_rng(max_rows)
    for _ in range(12):
        num_rows = rng.integers(0, max_rows + 1)
        num_decodes = rng.integers(0, num_rows + 1)
        budget = 80 - num_decodes
        prefills = []
        for left in range(num_rows - num_decodes, 0, -1):
            new = int(rng.integers(2, max(3, budget // left + 1)))
            if new > budget:
                break
            budget -= new
            prefills.append((new, new + int(rng.integers(0, 300 - new))))
        arrays, layout = make_case(
            rng,
            decodes=list(rng.integers(1, 300, num_decodes)),
            prefills=prefills,
            num_tokens=80,
            max_rows=max_rows,
            max_blocks=38,
            heads=(2, 1, 4),
            block_size=8,
        )
        check(arrays, layout, scale=0.7, sliding_window=150)


@pytest.mark.parametrize("decodes", [[], [9]], ids=["nothing", "decode"])
def test_one_token(decodes):
    arrays, layout = make_case(
        np.random.default_rng(6), decodes=decodes, prefills=[], num_tokens=1, max_rows=1, max_blocks=4
    )
    check(arrays, layout, scale=0.3)


def test_batch_composition_does_not_change_a_row():
    rng = np.random.default_rng(3)
    arrays, layout = make_case(rng, decodes=[40], prefills=[], num_tokens=16, max_rows=8, max_blocks=20)
    alone = attend(*arrays, **layout, scale=0.3)[0]
    lens = np.array([40, 77, 3, 0, 0, 0, 0, 0], np.int32)
    starts = np.array([0, 1, 2, 3, 3, 3, 3, 3, 3], np.int32)
    k = jnp.nan_to_num(arrays[1])  # the other rows read pages of the pool, whatever is there
    with_others = {**layout, "seq_lens": lens, "query_starts": starts, "num_decode_rows": 3, "num_rows": 3}
    with_others = {name: jnp.asarray(x, jnp.int32) for name, x in with_others.items()}
    together = attend(arrays[0], k, arrays[2], **with_others, scale=0.3)[0]
    np.testing.assert_array_equal(np.asarray(alone), np.asarray(together))


def test_refuses_what_does_not_exist():
    arrays, layout = make_case(
        np.random.default_rng(0), decodes=[1], prefills=[], num_tokens=4, max_rows=1, max_blocks=1, heads=(3, 3, 4)
    )
    unchecked = inspect.unwrap(paged_attention)  # the test suite's type check would refuse the name first
    with pytest.raises(ValueError, match="unknown implementation 'triton'"):
        unchecked(*arrays, **layout, scale=1.0, implementation="triton")
    with pytest.raises(ValueError, match="sliding_window"):
        paged_attention(*arrays, **layout, scale=1.0, sliding_window=0)
    with pytest.raises(ValueError, match="soft_cap"):
        paged_attention(*arrays, **layout, scale=1.0, soft_cap=0.0)
    with pytest.raises(ValueError, match="evenly"):
        paged_attention(arrays[0][:, :2], *arrays[1:], **layout, scale=1.0)


@pytest.mark.parametrize("axis_types", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto], ids=str)
def test_runs_on_local_heads(axis_types):
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(axis_types,), devices=jax.devices()[:2])
    arrays, layout = make_case(
        np.random.default_rng(4), decodes=[9, 30], prefills=[(7, 19)], num_tokens=16, max_rows=4, max_blocks=8
    )
    heads = P(None, "tensor")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(heads, heads, heads, P()), out_specs=heads)
    def run(q, k, v, layout):
        return paged_attention(q, k, v, **layout, scale=0.3, sliding_window=20)

    with jax.set_mesh(mesh):
        got = run(*jax.device_put(arrays, jax.NamedSharding(mesh, heads)), layout)
        replicated = attend(*arrays, **layout, scale=0.3, sliding_window=20)
    want = expected(arrays, layout, scale=0.3, sliding_window=20)
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-5)
    np.testing.assert_allclose(np.asarray(replicated), want, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_writes_land_where_they_belong(dtype):
    rng = np.random.default_rng(5)
    shape = (6, 2, 4, 3)
    k_pages, v_pages = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    k, v = (jnp.asarray(rng.standard_normal((5, 2, 3)), jnp.float32) for _ in range(2))
    index = np.array([7, 0, 23, 24, 31], np.int32)  # the last two are padding
    want = [np.array(pages) for pages in (k_pages, v_pages)]
    for token, place in enumerate(index[:3]):
        for pages, values in zip(want, (k, v), strict=True):
            pages[place // 4, :, place % 4] = values[token].astype(dtype)
    got = jax.jit(write_kv)(k_pages, v_pages, k, v, jnp.asarray(index))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_pool_is_never_copied(dtype):
    """A donated write, then attention over it: scratch memory must not grow with the number of blocks."""

    def step(k_pages, v_pages, q, k, v, index, layout):
        k_pages, v_pages = write_kv(k_pages, v_pages, k, v, index)
        return k_pages, v_pages, paged_attention(q, k_pages, v_pages, **layout, scale=1.0)

    def scratch(num_blocks):
        pages = jax.ShapeDtypeStruct((num_blocks, 2, 16, 32), dtype)
        tokens = [jax.ShapeDtypeStruct((16, heads, 32), dtype) for heads in (4, 2, 2)]
        shapes = {
            "block_tables": (8, 10),
            "seq_lens": (8,),
            "query_starts": (9,),
            "num_decode_rows": (),
            "num_rows": (),
        }
        layout = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
        index = jax.ShapeDtypeStruct((16,), jnp.int32)
        memory = (
            jax.jit(step, donate_argnums=(0, 1)).lower(pages, pages, *tokens, index, layout).compile().memory_analysis()
        )
        assert memory.alias_size_in_bytes == 2 * pages.size * pages.dtype.itemsize
        return memory.temp_size_in_bytes

    assert scratch(10_000) == scratch(1_000)
