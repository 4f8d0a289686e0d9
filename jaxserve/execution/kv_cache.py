"""Describe and allocate the device arrays of all that layers keep."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Int

from jaxserve.layers.batch import KVCache
from jaxserve.layers.cache import CacheSizes, CacheSpec
from jaxserve.layers.layouts import shard_bytes


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


def abstract_kv_cache(
    pool_specs: Sequence[CacheSpec | None],
    *,
    pool_of_layer: tuple[int, ...] = (),
    num_blocks: int,
    block_size: int,
    num_slots: int,
    dtype: jnp.dtype,
    mesh: Mesh | AbstractMesh,
    expert_loads: Any = None,
) -> KVCache:
    """Return the shapes and shardings of the pools, None for those of other stages; `expert_loads` are those of
    counters, if there are any.
    """
    sizes = CacheSizes(num_blocks, block_size, num_slots)
    return KVCache(
        pools=tuple(None if spec is None else spec.abstract(sizes, dtype=dtype, mesh=mesh) for spec in pool_specs),
        num_blocks=num_blocks,
        block_size=block_size,
        pool_of_layer=pool_of_layer,
        expert_loads=expert_loads,
    )


def copy_states(target: Any, source: Any, index: Int[Array, ""], source_index: Int[Array, ""]) -> Any:
    """Return `target` with one state replaced by one of `source`; both are trees of arrays with a state for each index
    of their first axis, or of blocks, of which the copies have none. Nothing is replaced where `index` is negative.
    """

    def copy(target: Array, source: Array) -> Array:
        if 0 in (len(target), len(source)):
            return target
        old = jax.lax.dynamic_slice_in_dim(target, index, 1)
        new = jax.lax.dynamic_slice_in_dim(source, source_index, 1)
        return jax.lax.dynamic_update_slice_in_dim(target, jax.lax.select(index < 0, old, new), index, 0)

    return jax.tree.map(copy, target, source)


def zeros[Pools](abstract: Pools) -> Pools:
    """Allocate pools, zeroed once: even masked positions must hold finite values."""
    return jax.tree.map(lambda pool: jnp.zeros(pool.shape, pool.dtype, device=pool.sharding), abstract)
