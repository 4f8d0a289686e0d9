"""How many KV blocks there are, and the device arrays that hold them."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import OutOfMemory
from jaxserve.layers.attention import KVSpec
from jaxserve.layers.batch import KVCache
from jaxserve.layers.sharding import mesh_axis

CPU_KV_CACHE_MEMORY = 2**30
"""Bytes for KV blocks on CPU, unless told otherwise."""

MAX_POSITIONS = 2**30
"""Positions in a pool: they are int32, and so are those behind its end that padding tokens get."""


def block_bytes(kv_specs: tuple[KVSpec, ...], *, block_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one block over all layers, K and V, on all devices together."""
    return sum(2 * spec.num_kv_heads * spec.head_dim for spec in kv_specs) * block_size * jnp.dtype(dtype).itemsize


def choose_num_blocks(memory: int, bytes_per_block: int, *, max_model_len: int, block_size: int) -> int:
    """Blocks that fit into `memory` bytes.

    Raises OutOfMemory if a single request of `max_model_len` tokens would not fit.
    """
    num_blocks = memory // bytes_per_block
    needed = math.ceil(max_model_len / block_size)
    if num_blocks < needed:
        raise OutOfMemory(
            f"{memory / 2**20:.0f} MiB for the KV cache hold {num_blocks * block_size} tokens, but max_model_len is "
            f"{max_model_len} ({needed * bytes_per_block / 2**20:.0f} MiB): "
            "lower --max-model-len or raise --kv-cache-memory"
        )
    return min(num_blocks, MAX_POSITIONS // block_size)


def kv_sharding(mesh: Mesh) -> NamedSharding:
    """Blocks are whole on every device, kv heads are split over the tensor axis."""
    return NamedSharding(mesh, PartitionSpec(None, mesh_axis("kv_heads", mesh), None, None))


def abstract_kv_cache(
    kv_specs: tuple[KVSpec, ...], *, num_blocks: int, block_size: int, dtype: jnp.dtype, mesh: Mesh
) -> KVCache:
    """Shapes and shardings of the pools."""
    sharding = kv_sharding(mesh)
    shapes = [(num_blocks, spec.num_kv_heads, block_size, spec.head_dim) for spec in kv_specs]

    def pools() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for shape in shapes)

    cache = jax.eval_shape(lambda: KVCache(k=pools(), v=pools()))
    return jax.tree.map(lambda pool: jax.ShapeDtypeStruct(pool.shape, pool.dtype, sharding=sharding), cache)


def init_kv_cache(abstract: KVCache) -> KVCache:
    """The pools, zeroed once: what a masked position holds must be finite."""
    return jax.tree.map(lambda pool: jnp.zeros(pool.shape, pool.dtype, device=pool.sharding), abstract)
