"""How many KV blocks there are, and the device arrays that hold them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import OutOfMemory
from jaxserve.layers.attention import KVSpec
from jaxserve.layers.batch import KVCache
from jaxserve.layers.sharding import kv_copies, mesh_axis
from jaxserve.scheduling.block_needs import BlockNeeds

CPU_KV_CACHE_MEMORY = 2**30
"""Bytes for KV blocks on CPU, unless told otherwise."""

MAX_POSITIONS = 2**30
"""Positions in a pool: they are int32, and so are those behind its end that padding tokens get."""


def block_bytes(pool_specs: tuple[KVSpec, ...], *, block_size: int, dtype: jnp.dtype, mesh: Mesh | AbstractMesh) -> int:
    """Bytes of one block in all pools, K and V, on all devices that share them.

    Heads that several devices have count for each of them; so does a latent, which every device has.
    """
    values = sum(spec.num_kv_heads * _copies(spec, mesh) * (spec.head_dim + spec.value_dim) for spec in pool_specs)
    return values * block_size * jnp.dtype(dtype).itemsize


def _copies(spec: KVSpec, mesh: Mesh | AbstractMesh) -> int:
    return kv_copies(spec.num_kv_heads, mesh, name="KV cache")


def choose_num_blocks(memory: int, bytes_per_block: int, *, max_model_len: int, needs: BlockNeeds) -> int:
    """Blocks that fit into `memory` bytes.

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


def kv_sharding(spec: KVSpec, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Blocks are whole on every device; kv heads are split over the tensor axis, unless they are a latent."""
    axis = None if spec.is_latent else mesh_axis("kv_heads", mesh)
    return NamedSharding(mesh, PartitionSpec(None, axis, None, None))


def abstract_kv_cache(
    pool_specs: tuple[KVSpec, ...],
    *,
    pool_of_layer: tuple[int, ...] = (),
    num_blocks: int,
    block_size: int,
    dtype: jnp.dtype,
    mesh: Mesh | AbstractMesh,
) -> KVCache:
    """Shapes and shardings of the pools; those of V are empty where a layer keeps latents."""

    def pool(spec: KVSpec, size: int) -> Any:  # stands in for an array
        num_kv_heads = spec.num_kv_heads * (1 if spec.is_latent else _copies(spec, mesh))
        shape = (num_blocks, num_kv_heads, block_size, size)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=kv_sharding(spec, mesh))

    return KVCache(
        k=tuple(pool(spec, spec.head_dim) for spec in pool_specs),
        v=tuple(pool(spec, spec.value_dim) for spec in pool_specs),
        pool_of_layer=pool_of_layer,
    )


def init_kv_cache(abstract: KVCache) -> KVCache:
    """The pools, zeroed once: what a masked position holds must be finite."""
    return jax.tree.map(lambda pool: jnp.zeros(pool.shape, pool.dtype, device=pool.sharding), abstract)
