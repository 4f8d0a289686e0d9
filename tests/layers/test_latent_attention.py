"""Latents: how they are stored, and which the kernel refuses. The goldens check that results are right."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from paged import empty_cache, make_batch

from jaxserve.bench.shapes import DEEPSEEK_V2_LITE
from jaxserve.execution.kv_cache import abstract_kv_cache, block_bytes
from jaxserve.layers.batch import Batch
from jaxserve.layers.latent_attention import LatentAttention, LatentHeads, PagedLatent
from jaxserve.layers.layouts import abstract_params
from jaxserve.layers.names import Names
from jaxserve.layers.paged_kv import KVSpec
from jaxserve.layers.rope import Rope
from jaxserve.layers.sharding import with_explicit_axes
from jaxserve.models import get_family
from pallas_kernels.deviceless import compile_lowered, h200_mesh

HEADS = LatentHeads(num_heads=4, query_rank=6, latent_size=10, plain_size=5, rotated_size=4, value_size=7)
ATTENTION = LatentAttention(heads=HEADS, rope=Rope(head_dim=4, theta=1e4))


def test_every_device_has_all_of_a_latent():
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    specs = (ATTENTION.cache_spec, KVSpec(2, 8))
    cache = empty_cache(specs, 3, mesh)
    assert [pool.shape for pool in jax.tree.leaves(cache)] == [(3, 1, 4, 14), (3, 2, 4, 8), (3, 2, 4, 8)]
    assert cache.pools[0].c.sharding.is_fully_replicated
    assert cache.pools[1].k.addressable_shards[0].data.shape == (3, 1, 4, 8)
    dtype = np.dtype(np.float32)
    shards = [shard.data for pool in jax.tree.leaves(cache) for shard in pool.addressable_shards]
    assert block_bytes(specs, block_size=4, dtype=dtype, mesh=mesh) * 3 == sum(shard.nbytes for shard in shards)
    assert block_bytes(specs, block_size=4, dtype=dtype, mesh=mesh) == (2 * 14 + 2 * 2 * 8) * 4 * 4


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rotated_rows_are_brought_in_order(is_interleaved):
    block = dataclasses.replace(ATTENTION, has_bias=True)
    specs = block.specs("a", 3, Names(is_interleaved=is_interleaved))
    rows = {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        for spec in jax.tree.leaves(specs)
        for name, shape in zip(spec.source, spec.source_shapes, strict=True)
    }

    def made(name):
        spec = specs[name]
        weight = spec.assemble(rows[source] for source in spec.source)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_tokens", "is_decode_only", "num_devices"), [(16, True, 1), (512, False, 1), (16, True, 2)]
)
def test_steps_of_deepseek_for_an_h200(num_tokens, is_decode_only, num_devices):
    """A layer without experts and one with them use the same kernels, and neither copies the pool."""
    fields = DEEPSEEK_V2_LITE | {"num_hidden_layers": 2, "vocab_size": 1024}
    family = get_family(fields)
    config = family.config(fields)
    mesh, num_rows = with_explicit_axes(h200_mesh((num_devices,), ("tensor",))), 16
    bfloat16 = np.dtype(jnp.bfloat16)
    params = abstract_params(family.param_specs(config), dtype=bfloat16, mesh=mesh)
    sizes = {"num_blocks": 4096, "block_size": 16, "num_slots": 0}
    cache = abstract_kv_cache(family.kv_specs(config), **sizes, dtype=bfloat16, mesh=mesh)

    def integers(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))

    batch = Batch(
        token_ids=integers(num_tokens),
        positions=integers(num_tokens),
        write_index=integers(num_tokens),
        query_starts=integers(num_rows + 1),
        seq_lens=integers(num_rows),
        block_tables=integers(num_rows, 64),
        slots=integers(num_rows),
        num_decode_rows=integers(),
        num_rows=integers(),
        is_decode_only=is_decode_only,
        kernels="sm90",
    )

    def step(params, batch, cache):
        return family.forward(params, config, batch, cache)

    def lower():
        with jax.set_mesh(mesh):
            return jax.jit(step, donate_argnums=2).lower(params, batch, cache)

    program = compile_lowered(lower)
    assert num_devices > 1 or program.thunks == {"kCommandBuffer": 1}  # sums over devices are in between
    assert program.spill_bytes == 0
    assert program.copies_of((4096, 1, 16, 576)) == []
    assert sum("latent_attention" in kernel.name for kernel in program.kernels) == 2


def test_the_kernel_names_the_size_that_it_refuses():
    batch, _ = make_batch([([1, 2, 3], (0,), 0, 3)], num_tokens=4, num_rows=1, num_blocks=1)
    q, stored, pages = (jnp.zeros(shape, jnp.bfloat16) for shape in ((4, 4, 14), (4, 14), (1, 1, 4, 14)))
    with pytest.raises(NotImplementedError, match=r"kv_lora_rank.* must be a multiple of 128 up to 512, got 10"):
        PagedLatent(pages).attend(q, stored, batch.replace(kernels="sm90"), latent_size=10, scale=1.0)
