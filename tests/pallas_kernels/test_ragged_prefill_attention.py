"""Each implementation of ragged prefill attention against its float64 definition: chunks, prefix hits, NaN outside
them.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from kernel_results import in_float
from poisoned_pages import HEAD_LAYOUTS, OPTIONS, SINKS, make_pages

from pallas_kernels.paging import Pages, Scores
from pallas_kernels.ragged_prefill_attention import ragged_prefill_attention
from pallas_kernels.ragged_prefill_attention.reference import ragged_prefill_attention_reference

TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 2e-2, jnp.float16: 3e-3}


def make_case(
    rng,
    chunks,
    *,
    num_skipped=0,
    num_tokens=64,
    max_rows=16,
    max_blocks=16,
    heads=(4, 2, 16),
    block_size=4,
    dtype=jnp.float32,
):
    """Return q, pages, before and the layout of rows of (new tokens, context length); everything outside
    them is NaN.

    The first `num_skipped` rows have a token each, but are not to be computed, and already have results.
    """
    num_heads, num_kv_heads, head_dim = heads
    chunks = [(1, 9)] * num_skipped + chunks
    counts = [new for new, _ in chunks]
    num_tokens, max_rows = num_tokens or sum(counts), max_rows or len(chunks)
    lens = [context for _, context in chunks] + [0] * (max_rows - len(chunks))
    k, v, tables = make_pages(rng, lens, num_kv_heads, head_dim, block_size=block_size, max_blocks=max_blocks)
    query_starts = np.full(max_rows + 1, sum(counts), np.int32)
    query_starts[: len(counts) + 1] = np.cumsum([0, *counts])
    q = rng.standard_normal((num_tokens, num_heads, head_dim)).astype(np.float32)
    q[sum(counts) :] = np.nan
    before = np.full_like(q, np.nan)
    before[:num_skipped] = rng.standard_normal(before[:num_skipped].shape)
    layout = {
        "block_tables": jnp.asarray(tables),
        "seq_lens": jnp.asarray(lens, jnp.int32),
        "query_starts": jnp.asarray(query_starts),
        "first_row": jnp.int32(num_skipped),
        "num_rows": jnp.int32(len(chunks)),
    }
    return jax.tree.map(lambda x: jnp.asarray(x).astype(dtype), (q, Pages(k, v), before)), layout


def expected(arrays, layout, scores):
    layout = {name: np.asarray(x) for name, x in layout.items()}
    layout |= {name: int(layout[name]) for name in ("first_row", "num_rows")}
    return ragged_prefill_attention_reference(*in_float(arrays), **layout, scores=scores)


attend = jax.jit(ragged_prefill_attention, static_argnames="implementation")


def check(arrays, layout, **options):
    scores = Scores(**options)
    got = attend(*arrays, **layout, scores=scores)
    assert got.dtype == arrays[0].dtype
    tolerance = TOLERANCE[arrays[0].dtype.type]
    np.testing.assert_allclose(in_float(got), expected(arrays, layout, scores), atol=tolerance, rtol=tolerance)


MIXES = {
    "nothing": [],
    "one token": [(1, 7)],
    "one prompt": [(20, 20)],
    "whole budget": [(64, 64)],
    "chunk of a prompt": [(13, 60)],
    "two-token row": [(2, 2), (2, 40)],
    "mixed": [(11, 11), (9, 50), (2, 3), (1, 1), (30, 33)],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("options", OPTIONS)
def test_matches_the_definition(mix, options):
    for num_skipped in (0, 3):
        if num_skipped and mix == "whole budget":
            continue
        arrays, layout = make_case(np.random.default_rng(0), MIXES[mix], num_skipped=num_skipped)
        check(arrays, layout, scale=0.3, **OPTIONS[options])


@pytest.mark.parametrize(("heads", "dtype"), HEAD_LAYOUTS)
def test_head_layouts_and_dtypes(heads, dtype):
    arrays, layout = make_case(
        np.random.default_rng(1), [(7, 19), (3, 3)], num_tokens=16, max_rows=6, max_blocks=5, heads=heads, dtype=dtype
    )
    check(arrays, layout, scale=heads[2] ** -0.5)


@pytest.mark.parametrize("block_size", [1, 2, 16, 64, 512])
def test_block_sizes(block_size):
    arrays, layout = make_case(
        np.random.default_rng(2),
        [(5, 260), (90, 97)],
        num_tokens=100,
        max_rows=7,
        max_blocks=-(-300 // block_size),
        heads=(2, 1, 8),
        block_size=block_size,
    )
    check(arrays, layout, scale=0.5, sliding_window=200)


@pytest.mark.parametrize("max_rows", [1, 2, 9, 33])
def test_random_steps(max_rows):
    """Random rows at one shape a case, longer than a chunk of the context."""
    rng = np.random.default_rng(max_rows)
    for _ in range(12):
        budget, chunks = 80, []
        for left in range(int(rng.integers(0, max_rows + 1)), 0, -1):
            new = int(rng.integers(1, max(2, budget // left + 1)))
            if new > budget:
                break
            budget -= new
            chunks.append((new, new + int(rng.integers(0, 300 - new))))
        arrays, layout = make_case(
            rng, chunks, num_tokens=80, max_rows=max_rows, max_blocks=38, heads=(2, 1, 4), block_size=8
        )
        check(arrays, layout, scale=0.7, sliding_window=150)


def test_refuses_what_does_not_exist():
    arrays, layout = make_case(
        np.random.default_rng(0), [(1, 1)], num_tokens=4, max_rows=1, max_blocks=1, heads=(3, 3, 4)
    )
    unchecked = inspect.unwrap(ragged_prefill_attention)  # the test suite's type check would refuse the name first
    with pytest.raises(ValueError, match="alibi_slopes must have one slope for each of 3 query heads"):
        unchecked(*arrays, **layout, scores=Scores(scale=1.0, alibi_slopes=jnp.zeros(2)))
    with pytest.raises(ValueError, match="sliding_window"):
        ragged_prefill_attention(*arrays, **layout, scores=Scores(scale=1.0, sliding_window=0))
    with pytest.raises(ValueError, match=r"before must be like q, float32\[4, 3, 4\], got float16\[4, 3, 4\]"):
        ragged_prefill_attention(*arrays[:2], arrays[2].astype(jnp.float16), **layout, scores=Scores(scale=1.0))
    with pytest.raises(ValueError, match="soft_cap"):
        ragged_prefill_attention(*arrays, **layout, scores=Scores(scale=1.0, soft_cap=0.0))
    with pytest.raises(ValueError, match="evenly"):
        ragged_prefill_attention(arrays[0][:, :2], arrays[1], **layout, scores=Scores(scale=1.0))


@pytest.mark.parametrize("axis_types", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto], ids=str)
def test_runs_on_local_heads(axis_types):
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(axis_types,), devices=jax.devices()[:2])
    arrays, layout = make_case(np.random.default_rng(4), [(7, 19), (5, 5)], num_tokens=16, max_rows=4)
    heads = P(None, "tensor")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(*[heads] * 3, P("tensor"), P()), out_specs=heads)
    def run(q, pages, before, sinks, layout):
        return ragged_prefill_attention(
            q, pages, before, **layout, scores=Scores(scale=0.3, sliding_window=20, sinks=sinks)
        )

    with jax.set_mesh(mesh):
        placed = jax.device_put(arrays, jax.NamedSharding(mesh, heads))
        got = run(*placed, jax.device_put(SINKS, jax.NamedSharding(mesh, P("tensor"))), layout)
        replicated = attend(*arrays, **layout, scores=Scores(scale=0.3, sliding_window=20, sinks=SINKS))
    want = expected(arrays, layout, Scores(scale=0.3, sliding_window=20, sinks=SINKS))
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-5)
    np.testing.assert_allclose(np.asarray(replicated), want, atol=2e-5)
