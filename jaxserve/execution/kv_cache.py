"""Choose how many KV blocks there are, and describe and allocate the device arrays of all that layers keep."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxserve.errors import OutOfMemory
from jaxserve.layers.batch import KVCache
from jaxserve.layers.cache import CacheSizes, CacheSpec
from jaxserve.layers.params import shard_bytes
from jaxserve.scheduling.block_needs import BlockNeeds

CPU_KV_CACHE_MEMORY = 2**30
"""Bytes for KV blocks on CPU, unless configured."""

MAX_POSITIONS = 2**30
"""Most positions in a pool: they are int32, and so are those beyond its end that padding tokens get."""


def block_bytes(
    pool_specs: Sequence[CacheSpec], *, block_size: int, dtype: jnp.dtype, mesh: Mesh | AbstractMesh
) -> int:
    """Return the bytes of one block in all pools, on all devices together.

    What several devices hold counts once for each.
    """
    with_one, without = (
        _bytes_on_a_device(pool_specs, CacheSizes(num_blocks, block_size, num_slots=0), dtype=dtype, mesh=mesh)
        for num_blocks in (1, 0)
    )
    return (with_one - without) * mesh.size


def slot_bytes(pool_specs: Sequence[CacheSpec], *, num_slots: int, dtype: jnp.dtype, mesh: Mesh | AbstractMesh) -> int:
    """Return the bytes that the pools take on each device besides their blocks, for the state of requests."""
    return _bytes_on_a_device(pool_specs, CacheSizes(0, 1, num_slots), dtype=dtype, mesh=mesh)


def _bytes_on_a_device(
    pool_specs: Sequence[CacheSpec], sizes: CacheSizes, *, dtype: jnp.dtype, mesh: Mesh | AbstractMesh
) -> int:
    pools = [spec.abstract(sizes, dtype=dtype, mesh=mesh) for spec in pool_specs]
    return sum(map(shard_bytes, jax.tree.leaves(pools)))


def choose_num_blocks(memory: int, bytes_per_block: int, *, max_model_len: int, needs: BlockNeeds) -> int:
    """Return the number of blocks that fit into `memory` bytes.

    Raises OutOfMemory if a single request of `max_model_len` tokens would not fit.
    """
    num_blocks = memory // bytes_per_block
    needed = needs.peak(max_model_len)
    if num_blocks < needed:
        raise OutOfMemory(
            f"{memory / 2**20:.0f} MiB for the KV cache hold {needs.longest(num_blocks, limit=max_model_len)} tokens, "
            f"but max_model_len is {max_model_len} ({needed * bytes_per_block / 2**20:.0f} MiB): "
            "lower --max-model-len or raise --kv-cache-memory"
        )
    return min(num_blocks, MAX_POSITIONS // needs.block_size)


def abstract_kv_cache(
    pool_specs: Sequence[CacheSpec],
    *,
    pool_of_layer: tuple[int, ...] = (),
    num_blocks: int,
    block_size: int,
    num_slots: int,
    dtype: jnp.dtype,
    mesh: Mesh | AbstractMesh,
) -> KVCache:
    """Return the shapes and shardings of the pools."""
    sizes = CacheSizes(num_blocks, block_size, num_slots)
    return KVCache(
        pools=tuple(spec.abstract(sizes, dtype=dtype, mesh=mesh) for spec in pool_specs),
        num_blocks=num_blocks,
        block_size=block_size,
        pool_of_layer=pool_of_layer,
    )


def init_kv_cache(abstract: KVCache) -> KVCache:
    """Allocate the pools, zeroed once: even masked positions must hold finite values."""
    return jax.tree.map(lambda pool: jnp.zeros(pool.shape, pool.dtype, device=pool.sharding), abstract)
