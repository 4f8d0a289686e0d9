"""Latents: what of them lies where, and who cannot attend to them yet. That results are right, the goldens show."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged import empty_cache, make_batch

from jaxserve.execution.kv_cache import block_bytes
from jaxserve.layers.attention import KVSpec
from jaxserve.layers.latent_attention import LatentHeads, latent_attention_specs, paged_latent_attention

HEADS = LatentHeads(num_heads=4, query_rank=6, latent_size=10, plain_size=5, rotated_size=4, value_size=7)


def test_every_device_has_all_of_a_latent():
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    specs = (HEADS.kv_spec, KVSpec(2, 8))
    cache = empty_cache(specs, 3, mesh)
    assert [pool.shape for pool in (*cache.k, *cache.v)] == [(3, 1, 4, 14), (3, 2, 4, 8), (3, 1, 4, 0), (3, 2, 4, 8)]
    assert cache.k[0].sharding.is_fully_replicated
    assert cache.k[1].addressable_shards[0].data.shape == (3, 1, 4, 8)
    dtype = np.dtype(np.float32)
    shards = [shard.data for pool in (*cache.k, *cache.v) for shard in pool.addressable_shards]
    assert block_bytes(specs, block_size=4, dtype=dtype, mesh=mesh) * 3 == sum(shard.nbytes for shard in shards)
    assert block_bytes(specs, block_size=4, dtype=dtype) == (14 + 2 * 2 * 8) * 4 * 4


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rotated_rows_are_brought_in_order(is_interleaved):
    specs = latent_attention_specs("a", HEADS, hidden_size=3, bias=True, is_interleaved=is_interleaved)
    rows = {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        for spec in jax.tree.leaves(specs)
        for name, shape in zip(spec.source, spec.source_shapes, strict=True)
    }

    def made(name):
        spec = specs[name]
        weight = spec.transform(*(rows[source] for source in spec.source))
        assert weight.shape == spec.shape
        return weight

    order = [0, 2, 1, 3] if is_interleaved else [0, 1, 2, 3]
    np.testing.assert_array_equal(made("down")[:6], rows["a.q_a_proj.weight"])
    np.testing.assert_array_equal(made("down")[6:16], rows["a.kv_a_proj_with_mqa.weight"][:10])
    np.testing.assert_array_equal(made("down")[16:], rows["a.kv_a_proj_with_mqa.weight"][10:][order])
    np.testing.assert_array_equal(made("down_bias")[16:], rows["a.kv_a_proj_with_mqa.bias"][10:][order])
    heads = rows["a.q_b_proj.weight"].reshape(4, 9, 6)
    np.testing.assert_array_equal(made("q"), np.concatenate([heads[:, :5], heads[:, 5:][:, order]], axis=1))
    heads = rows["a.kv_b_proj.weight"].reshape(4, 12, 10)
    np.testing.assert_array_equal(made("k_up"), heads[:, :5])
    np.testing.assert_array_equal(made("v_up"), heads[:, 5:])


def test_no_kernel_for_hopper_yet():
    batch, _ = make_batch([([1, 2, 3], (0,), 0, 3)], num_tokens=4, num_rows=1, num_blocks=1)
    q, stored, pages = jnp.zeros((4, 4, 14)), jnp.zeros((4, 14)), jnp.zeros((1, 1, 4, 14))
    with pytest.raises(NotImplementedError, match="latent attention has no kernel for Hopper GPUs yet"):
        paged_latent_attention(q, stored, pages, batch.replace(kernels="sm90"), scale=1.0)
