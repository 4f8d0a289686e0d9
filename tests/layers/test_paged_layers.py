"""Attention as the layers call it: a step's K and V are written, then rows that decode and rows with chunks attend."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_only
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from poisoned_pages import make_pages

from jaxserve.layers.attention import Attention, HeadNorm
from jaxserve.layers.batch import Batch, LayerStep
from jaxserve.layers.norm import Norm
from jaxserve.layers.paged_kv import PagedKV
from jaxserve.layers.sharding import with_explicit_axes
from pallas_kernels.deviceless import compile_lowered, h200_mesh
from pallas_kernels.paging import Pages, Scores
from pallas_kernels.ragged_prefill_attention.reference import ragged_prefill_attention_reference

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 16, 4
SCORES = Scores(scale=0.3, sliding_window=20)


def make_step(rng, decodes, prefills, *, num_tokens, max_rows, max_blocks=16):
    """Rows with contexts of `decodes`, then those of (new tokens, context) `prefills`: the pages before the step, the
    arguments of the layer, and the result that it should have.
    """
    lens = [*decodes, *(context for _, context in prefills)]
    counts = [1] * len(decodes) + [new for new, _ in prefills]
    query_starts = np.full(max_rows + 1, sum(counts), np.int32)
    query_starts[: len(lens) + 1] = np.cumsum([0, *counts])
    seq_lens = np.array(lens + [0] * (max_rows - len(lens)), np.int32)
    *after, tables = make_pages(rng, seq_lens, KV_HEADS, HEAD_DIM, block_size=BLOCK_SIZE, max_blocks=max_blocks)
    q = rng.standard_normal((num_tokens, HEADS, HEAD_DIM)).astype(np.float32)
    q[sum(counts) :] = np.nan
    want = ragged_prefill_attention_reference(
        q,
        Pages(*after),
        block_tables=tables,
        seq_lens=seq_lens,
        query_starts=query_starts,
        first_row=0,
        num_rows=len(lens),
        scores=SCORES,
    )
    new = np.full((2, num_tokens, KV_HEADS, HEAD_DIM), np.nan, np.float32)
    before = [pages.copy() for pages in after]
    write_index = after[0].shape[0] * BLOCK_SIZE + np.arange(num_tokens, dtype=np.int32)
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        for i in range(count):
            page, offset = divmod(length - count + i, BLOCK_SIZE)
            place, token = (tables[row, page], slice(None), offset), query_starts[row] + i
            write_index[token] = tables[row, page] * BLOCK_SIZE + offset
            for values, pages, full in zip(new, before, after, strict=True):
                values[token], pages[place] = full[place], np.nan
    batch = Batch(
        token_ids=jnp.zeros(num_tokens, jnp.int32),
        positions=jnp.zeros(num_tokens, jnp.int32),
        write_index=jnp.asarray(write_index),
        query_starts=jnp.asarray(query_starts),
        seq_lens=jnp.asarray(seq_lens),
        block_tables=jnp.asarray(tables),
        slots=jnp.arange(len(seq_lens), dtype=jnp.int32),
        num_decode_rows=jnp.int32(len(decodes)),
        num_rows=jnp.int32(len(lens)),
    )
    of_kv_heads = q.reshape(num_tokens, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    qkv = np.concatenate([of_kv_heads, *(x[:, :, None] for x in new)], axis=2)
    return tuple(map(jnp.asarray, (qkv, *before))), batch, (want, *after)


def layer(qkv, k_pages, v_pages, batch):
    out, cache = PagedKV(k_pages, v_pages).attend(qkv, batch, SCORES, rotation=None, head_norms=None)
    return out, cache.k, cache.v


MIXES = {
    "nothing": ([], []),
    "one decode": ([7], []),
    "decodes": ([1, 33, 64, 2, 17, 5, 5, 9, 30, 64, 12], []),
    "prompts": ([], [(20, 20), (13, 60)]),
    "whole budget": ([], [(64, 64)]),
    "mixed": ([5, 64, 1], [(11, 11), (9, 50), (2, 3)]),
    "full rows": ([3] * 14, [(2, 64), (40, 41)]),
}


@pytest.mark.parametrize("mix", MIXES)
def test_steps(mix):
    arguments, batch, want = make_step(np.random.default_rng(0), *MIXES[mix], num_tokens=64, max_rows=16)
    for a, b in zip(jax.jit(layer)(*arguments, batch), want, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, atol=2e-5)


@pytest.mark.parametrize("decodes", [[], [9]], ids=["nothing", "decode"])
def test_one_token(decodes):
    arguments, batch, want = make_step(np.random.default_rng(1), decodes, [], num_tokens=1, max_rows=1)
    for a, b in zip(jax.jit(layer)(*arguments, batch), want, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, atol=2e-5)


def test_devices_keep_their_heads():
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    arguments, batch, want = make_step(np.random.default_rng(2), [9, 30], [(7, 19)], num_tokens=16, max_rows=4)
    heads = NamedSharding(mesh, P(None, "tensor"))
    with jax.set_mesh(mesh):
        got = jax.jit(layer)(*jax.device_put(arguments, heads), batch)
    assert [x.sharding.spec[1] for x in got] == ["tensor"] * 3
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, atol=2e-5)


@pytest.mark.parametrize("dtype", quick_only([jnp.float32, jnp.bfloat16, jnp.float16], jnp.bfloat16))
def test_the_pool_is_never_copied(dtype):
    """With donated pages, scratch memory must not grow with the number of blocks."""
    _, batch, _ = make_step(np.random.default_rng(3), [9], [(3, 5)], num_tokens=16, max_rows=8)

    def scratch(num_blocks):
        pages = jax.ShapeDtypeStruct((num_blocks, 2, 16, 32), dtype)
        qkv = jax.ShapeDtypeStruct((16, 2, 4, 32), dtype)
        lowered = jax.jit(layer, donate_argnums=(1, 2)).lower(qkv, pages, pages, batch)
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes == 2 * pages.size * pages.dtype.itemsize
        return memory.temp_size_in_bytes

    assert scratch(10_000) == scratch(1_000)


@pytest.mark.slow
@pytest.mark.parametrize("is_decode_only", [True, False])
def test_norms_of_heads_are_no_kernels_of_their_own(is_decode_only):
    """Compiled for an H200, as Qwen 3 and Gemma 3 have them: between two matmuls no pass over the heads more."""
    _, batch, _ = make_step(np.random.default_rng(4), [9], [], num_tokens=8, max_rows=8)
    batch = dataclasses.replace(batch, kernels="sm90", is_decode_only=is_decode_only)
    mesh = with_explicit_axes(h200_mesh((1,), ("tensor",)))

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    @functools.partial(jax.jit, donate_argnums=(2, 3))
    def attend(params, qkv, k_pages, v_pages, batch, rotation):
        step = LayerStep(batch, PagedKV(k_pages, v_pages), rotation)
        head_norm = HeadNorm(norm=Norm(eps=1e-6)) if params else None
        attention = Attention(num_heads=8, num_kv_heads=2, head_dim=128, rope=None, head_norm=head_norm)
        return attention.attend(params, qkv, step)

    pages = array(1_000, 2, 16, 128, dtype=jnp.bfloat16)
    arrays = (array(8, 2, 6, 128, dtype=jnp.bfloat16), pages, pages)
    batch = jax.tree.map(lambda x: array(*x.shape, dtype=x.dtype), batch)

    def compile_with(params):
        with jax.set_mesh(mesh):
            return compile_lowered(lambda: attend.lower(params, *arrays, batch, (array(8, 64),) * 2))

    without, normed = compile_with({}), compile_with({"q_norm": array(128), "k_norm": array(128)})
    assert normed.num_launches == without.num_launches
    assert normed.copies_of(pages.shape) == []
