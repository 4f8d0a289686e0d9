"""Random weights, for tests, benchmarks and `--load-format dummy`."""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxserve.layers.layouts import Layout, layouts
from jaxserve.layers.params import LeafSpec, Params, ParamSpec
from jaxserve.quantization.scheme import Init


def init_params(specs: Params, *, dtype: np.dtype, mesh: Mesh, seed: int = 0) -> Params:
    """Return random weights, generated on the devices that hold them.

    A weight depends only on the seed and its path in the tree: not on the mesh, nor on the other weights. One small
    program per distinct shape is compiled.
    """
    base = jax.random.key(seed)

    def init(path: Any, spec: ParamSpec, layout: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        key = jax.random.fold_in(base, np.uint32(zlib.crc32(name.encode())))
        return jax.tree.map(functools.partial(init_leaf, key), spec.leaves, layout)

    def init_leaf(key: jax.Array, leaf: LeafSpec, layout: Layout) -> jax.Array:
        make = _initializer(
            leaf.shape, leaf.dtype_in(dtype), leaf.init, leaf.init_scale, layout.repeats, layout.sharding
        )
        return make(key, layout.indices)

    return jax.tree_util.tree_map_with_path(init, specs, layouts(specs, mesh))


@functools.lru_cache(maxsize=64)
def _initializer(
    shape: tuple[int, ...],
    dtype: np.dtype,
    init: Init,
    scale: float,
    repeats: int,
    sharding: NamedSharding,
) -> Callable[[jax.Array, tuple[np.ndarray, ...]], jax.Array]:
    def make(key: jax.Array) -> jax.Array:
        if init == "constant":
            return jnp.full(shape, scale, dtype)
        if init in ("bits", "int8", "int4"):
            bits = jax.random.bits(key, shape, jnp.uint8)
            if init == "int4":  # -8, which has no counterpart, becomes 0: codes 0 and 8
                bits = jnp.where(bits & 0xF, bits, bits | 8)
                bits = jnp.where(bits & 0xF0, bits, bits | 0x80)
            values = jax.lax.bitcast_convert_type(bits, dtype)
            return jnp.where(values == -128, 0, values) if init == "int8" else values
        computed = jnp.float32 if dtype.itemsize == 1 else dtype
        return (scale * jax.random.normal(key, shape, computed)).astype(dtype)

    def laid_out(values: jax.Array) -> jax.Array:
        return values if repeats == 1 else jnp.repeat(values, repeats, axis=-1)

    return jax.jit(lambda key, indices: laid_out(make(key)[indices]), out_shardings=sharding)
