"""Tiny models and decode steps of them, on one device or several."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.bench.shapes import LLAMA_100M
from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.layouts import layouts
from jaxserve.layers.paged_kv import PagedKV
from jaxserve.layers.peers import abstract_peers
from jaxserve.layers.random_params import init_params
from jaxserve.layers.sharding import with_explicit_axes
from jaxserve.models import get_family

FIELDS = LLAMA_100M | {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NUM_BLOCKS, BLOCK_SIZE = 12, 4


def make_batch(lens, kernels="xla"):
    """Return a Batch of rows with one token each; rows of length 0, after all others, are padding."""
    num_rows, num_real = len(lens), np.count_nonzero(lens)
    tables = np.arange(num_rows * 3, dtype=np.int32).reshape(num_rows, 3)
    tables[num_real:] = 0
    positions = np.maximum(np.array(lens, np.int32) - 1, 0)
    write_index = tables[np.arange(num_rows), positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    write_index[num_real:] = NUM_BLOCKS * BLOCK_SIZE + np.arange(num_rows - num_real)
    return Batch(
        token_ids=jnp.arange(num_rows, dtype=jnp.int32),
        positions=jnp.asarray(positions),
        write_index=jnp.asarray(write_index),
        query_starts=jnp.minimum(jnp.arange(num_rows + 1, dtype=jnp.int32), num_real),
        seq_lens=jnp.asarray(lens, jnp.int32),
        block_tables=jnp.asarray(tables),
        slots=jnp.arange(num_rows, dtype=jnp.int32),
        num_decode_rows=jnp.int32(num_real),
        num_rows=jnp.int32(num_real),
        is_decode_only=True,
        kernels=kernels,
    )


def random_pools(num_layers, num_heads=2):
    """Return the pools of layers with heads of 16 values."""
    rng, shape = np.random.default_rng(0), (NUM_BLOCKS, num_heads, BLOCK_SIZE, 16)
    return [
        PagedKV(*(jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2))) for _ in range(num_layers)
    ]


def placed(batch, cache, mesh):
    """Return a batch that all devices have, and a cache of which each has its heads."""
    by_head = PartitionSpec(None, "tensor" if mesh.size > 1 else None)
    return jax.device_put((batch, cache), (NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, by_head)))


def make_cache(pools):
    """Return a KVCache with one pool per layer."""
    return KVCache(tuple(pools), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


@functools.cache
def make_model(model_type, **changes):
    fields = FIELDS | {"model_type": model_type, "head_dim": 16} | changes
    family = get_family(fields)
    config = family.config(fields)
    return family, config, make_params(family, config)


def make_params(family, config):
    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    params = init_params(family.param_specs(config), dtype=np.dtype("float32"), mesh=mesh, seed=1)
    params = jax.tree.map(lambda x: jax.device_get(x) * np.float32(3), params)  # so that no layer does next to nothing
    return jax.tree.map(jnp.asarray, params)


def make_mesh(num_devices):
    return with_explicit_axes(jax.make_mesh((num_devices,), ("tensor",), devices=jax.devices()[:num_devices]))


def abstract_sums(mesh, size, *, num_rows=256):
    """Return the shapes of a Batch's `peers`."""
    peers = abstract_peers(
        mesh,
        hidden_size=size,
        vocab_size=64,
        dtype=jnp.dtype(jnp.bfloat16),
        max_num_tokens=num_rows,
        max_num_rows=num_rows,
    )
    return None if peers is None else peers.sums


def split(params, family, config, mesh):
    return jax.tree.map(lambda x, layout: layout.put(np.asarray(x)), params, layouts(family.param_specs(config), mesh))
