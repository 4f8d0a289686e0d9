"""Products of activations and codes on a CPU: a tile of the matrix becomes floats, which stay in the cache, at a time.

As one matmul, XLA writes all values of a matrix to memory and reads them again: for 6 matrices of 3,072 x 3,072 in int8
a token costs 120 ms that way, 6 in tiles, 11 with matrices of float32 and 140 with those of bfloat16 (2 cores of an
AMD EPYC with AVX-512, others busy).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.quantization.scheme import Parts, Scheme
from jaxserve.quantization.values import dequantize, dequantize_pairs

TILE = 2**20
"""Values of a tile: 4 MiB of float32, in which a matmul still keeps all cores busy."""


def multiply_in_tiles(
    x: Float[Array, "T K"], scheme: Scheme, rows: Parts, *, dtype: jnp.dtype, output_dtype: jnp.dtype
) -> Float[Array, "T N"]:
    """Return x @ weight^T of a weight [N, K] whose values are rounded to `dtype`; sums are in float32."""
    num_rows, num_inputs = len(rows.codes), x.shape[1]
    size = min(num_rows, max(16, TILE // num_inputs // 16 * 16))
    has_pairs = scheme.kind.per_byte == 2 and num_inputs // rows.scales.shape[-1] % 2 == 0

    def product(first: Int[Array, ""]) -> Float[Array, "T R"]:
        tile = jax.tree.map(lambda part: jax.lax.dynamic_slice_in_dim(part, first, size), rows)
        if not has_pairs:
            return _dot(x, dequantize(scheme, tile, dtype))
        even, odd = dequantize_pairs(scheme, tile, dtype)
        return _dot(x[:, ::2], even) + _dot(x[:, 1::2], odd)

    # The last tile overlaps the one before if the number of rows is not a multiple of a tile's.
    num_tiles = -(-num_rows // size)
    starts = jnp.minimum(jnp.arange(num_tiles) * size, num_rows - size)
    y = jax.lax.map(product, starts)
    most = y[:-1].swapaxes(0, 1).reshape(len(x), (num_tiles - 1) * size)
    return jnp.concatenate([most, y[-1, :, num_tiles * size - num_rows :]], axis=1).astype(output_dtype)


def _dot(x: Float[Array, "T K"], values: Float[Array, "R K"]) -> Float[Array, "T R"]:
    return jax.lax.dot_general(
        x,
        values,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
