"""Each implementation of paged attention against its float64 definition: mixed lengths, NaN outside them, all
options.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from jax.sharding import PartitionSpec as P
from kernel_results import in_float
from poisoned_pages import HEAD_LAYOUTS, OPTIONS, SINKS, SLOPES, make_pages

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paging import Pages, Scores

TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 2e-2, jnp.float16: 3e-3}


def make_case(rng, lens, *, num_queries=1, max_blocks=16, heads=(4, 2, 16), block_size=4, dtype=jnp.float32):
    """Return q, pages and the layout of rows with contexts of `lens`; everything outside queries and
    contexts is NaN.
    """
    num_heads, num_kv_heads, head_dim = heads
    k, v, tables = make_pages(rng, lens, num_kv_heads, head_dim, block_size=block_size, max_blocks=max_blocks)
    q = rng.standard_normal((len(lens), num_queries, num_heads, head_dim)).astype(np.float32)
    q[np.array(lens) == 0] = np.nan
    layout = {"block_tables": jnp.asarray(tables), "seq_lens": jnp.asarray(lens, jnp.int32)}
    return jax.tree.map(lambda x: jnp.asarray(x).astype(dtype), (q, Pages(k, v))), layout


def expected(arrays, layout, scores):
    layout = {name: np.asarray(x) for name, x in layout.items()}
    return paged_attention_reference(*in_float(arrays), **layout, scores=scores)


attend = jax.jit(paged_attention, static_argnames="implementation")


def check(arrays, layout, **options):
    scores = Scores(**options)
    got, want = attend(*arrays, **layout, scores=scores), expected(arrays, layout, scores)
    assert [x.dtype for x in got] == [arrays[0].dtype, jnp.float32]
    tolerance = TOLERANCE[arrays[0].dtype.type]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(in_float(a), b, atol=tolerance, rtol=tolerance)


LENS = {
    "nothing": [0, 0, 0],
    "one row": [7],
    "first token": [1],
    "mixed": [1, 33, 64, 2, 17, 0, 5, 9, 30, 64, 12],
    "holes": [0, 0, 0, 0, 0, 40, 0, 0, 0, 3],
}


@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("options", quick_first(OPTIONS, 2))
def test_decode(lens, options):
    arrays, layout = make_case(np.random.default_rng(0), LENS[lens])
    check(arrays, layout, scale=0.3, **OPTIONS[options])


@pytest.mark.parametrize("num_queries", quick_first([2, 5, 8]))
@pytest.mark.parametrize("options", OPTIONS)
def test_verification(num_queries, options):
    lens = [0, 8, 64, 13, 40, 31, 9, 0, 50]
    arrays, layout = make_case(np.random.default_rng(1), lens, num_queries=num_queries)
    check(arrays, layout, scale=0.3, **OPTIONS[options])


@pytest.mark.parametrize(("heads", "dtype"), HEAD_LAYOUTS)
def test_head_layouts_and_dtypes(heads, dtype):
    rng = np.random.default_rng(2)
    arrays, layout = make_case(rng, [9, 3, 20, 3], num_queries=3, max_blocks=5, heads=heads, dtype=dtype)
    check(arrays, layout, scale=heads[2] ** -0.5, sinks=rng.standard_normal(heads[0]).astype(np.float32))


@pytest.mark.parametrize("block_size", [1, 2, 16, 64, 512])
def test_block_sizes(block_size):
    arrays, layout = make_case(
        np.random.default_rng(3),
        [1, 300, 129, 64],
        max_blocks=-(-300 // block_size),
        heads=(2, 1, 8),
        block_size=block_size,
    )
    check(arrays, layout, scale=0.5, sliding_window=270)


def test_batch_composition_does_not_change_a_row():
    rng = np.random.default_rng(4)
    (q, pages), layout = make_case(rng, [40, 0, 0, 0, 0], max_blocks=20)
    alone = attend(q, pages, **layout, scores=Scores(scale=0.3))
    layout["seq_lens"] = jnp.array([40, 77, 3, 0, 5], jnp.int32)  # the other rows read whatever is there
    together = attend(q, pages, **layout, scores=Scores(scale=0.3))
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_array_equal(np.asarray(a[0]), np.asarray(b[0]))


@pytest.mark.parametrize("poisoned", ["k", "v"])
def test_a_nan_inside_the_context_shows(poisoned):
    (q, pages), layout = make_case(np.random.default_rng(5), [30, 30])
    block = layout["block_tables"][0, 3]
    pages = pages._replace(**{poisoned: getattr(pages, poisoned).at[block, 1, 2].set(jnp.nan)})
    got, _ = attend(q, pages, **layout, scores=Scores(scale=0.3))
    is_nan = np.isnan(np.asarray(got)).all(axis=-1)
    np.testing.assert_array_equal(is_nan[:, 0], [[False, False, True, True], [False] * 4])


def test_results_over_parts_of_a_context_combine():
    rng = np.random.default_rng(6)
    (q, pages), layout = make_case(rng, [40])
    whole, whole_lse = attend(q, pages, **layout, scores=Scores(scale=0.3))
    first = attend(q, pages, **{**layout, "seq_lens": jnp.array([24], jnp.int32)}, scores=Scores(scale=0.3))
    tables = jnp.roll(layout["block_tables"], -6, axis=1)
    second = attend(q, pages, block_tables=tables, seq_lens=jnp.array([16], jnp.int32), scores=Scores(scale=0.3))
    lse = jnp.logaddexp(first[1], second[1])
    parts = sum(out * jnp.exp(part - lse)[..., None] for out, part in (first, second))
    np.testing.assert_allclose(np.asarray(lse), np.asarray(whole_lse), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(parts), np.asarray(whole), atol=1e-5)


def test_refuses_what_does_not_exist():
    arrays, layout = make_case(np.random.default_rng(0), [1], max_blocks=1, heads=(3, 3, 4))
    unchecked = inspect.unwrap(paged_attention)  # the test suite's type check would refuse these first
    with pytest.raises(ValueError, match="sinks must have one logit for each of 3 query heads"):
        unchecked(*arrays, **layout, scores=Scores(scale=1.0, sinks=jnp.zeros(2)))
    with pytest.raises(ValueError, match="alibi_slopes must have one slope for each of 3 query heads"):
        unchecked(*arrays, **layout, scores=Scores(scale=1.0, alibi_slopes=jnp.zeros(2)))
    with pytest.raises(ValueError, match="sliding_window"):
        paged_attention(*arrays, **layout, scores=Scores(scale=1.0, sliding_window=0))
    with pytest.raises(ValueError, match="soft_cap"):
        paged_attention(*arrays, **layout, scores=Scores(scale=1.0, soft_cap=0.0))
    with pytest.raises(ValueError, match=r"room must be \d+ or more, the number of rows, got 0"):
        paged_attention(*arrays, **layout, scores=Scores(scale=1.0), room=0)
    with pytest.raises(ValueError, match="evenly"):
        paged_attention(arrays[0][:, :, :2], *arrays[1:], **layout, scores=Scores(scale=1.0))


@pytest.mark.parametrize("axis_types", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto], ids=str)
def test_runs_on_local_heads(axis_types):
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(axis_types,), devices=jax.devices()[:2])
    arrays, layout = make_case(np.random.default_rng(7), [9, 30, 0, 13], num_queries=2)
    heads, pages = P(None, None, "tensor"), P(None, "tensor")
    specs = (heads, Pages(pages, pages), P("tensor"), P("tensor"))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(*specs, P()), out_specs=(heads, heads))
    def run(q, pages, sinks, slopes, layout):
        return paged_attention(
            q, pages, **layout, scores=Scores(scale=0.3, sliding_window=20, sinks=sinks, alibi_slopes=slopes)
        )

    with jax.set_mesh(mesh):
        placed = jax.device_put(
            (*arrays, SINKS, SLOPES), jax.tree.map(functools.partial(jax.NamedSharding, mesh), specs)
        )
        got = run(*placed, layout)
        replicated = attend(
            *arrays, **layout, scores=Scores(scale=0.3, sliding_window=20, sinks=SINKS, alibi_slopes=SLOPES)
        )
    want = expected(arrays, layout, Scores(scale=0.3, sliding_window=20, sinks=SINKS, alibi_slopes=SLOPES))
    for results in (got, replicated):
        for a, b in zip(results, want, strict=True):
            np.testing.assert_allclose(np.asarray(a), b, atol=2e-5)
