"""Pages: the keys and values of a layer's tokens, with the scales of both if they are held in 8 bits."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
"""The dtypes of 8 bits in which vectors are held, and the number that the largest value of a vector becomes."""

SMALLEST = 1e-30
"""Vectors whose largest value is less are held as if it were this: their scale must not be 0."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Bytes:
    """Says that pools of uint8 have the bits of another dtype; a leaf of no array in a pytree.

    XLA for CPUs converts a whole pool of 8-bit floats to float16 and back to write a single token into it.
    """

    dtype: str

    def of(self, codes: Any) -> Any:
        """Return codes of the dtype as they are stored."""
        return jax.lax.bitcast_convert_type(codes, jnp.uint8)

    def codes(self, stored: Any) -> Any:
        """Return what `of` stored."""
        return jax.lax.bitcast_convert_type(stored, jnp.dtype(self.dtype))


class Pages(NamedTuple):
    """P pages of S tokens each. A (page, head) tile is contiguous, so that a kernel fetches it with one copy."""

    k: Num[Array, "P K S D"]
    v: Num[Array, "P K S D"]
    scales: Float[Array, "P K kinds S"] | None = None
    """The float32 factors of each token's key, then of its value, in each head; one factor if keys are values too. None
    if the pages hold keys and values as they are.
    """
    stored: Bytes | None = None
    """Set if pools of 8 bits are held as uint8, as `pool_dtype` says; kernels take pools of the dtype itself."""

    @property
    def dtype(self) -> Any:
        """The dtype of keys and values."""
        return self.k.dtype if self.stored is None else jnp.dtype(self.stored.dtype)


def pool_dtype(dtype: Any, platform: str) -> tuple[Any, Bytes | None]:
    """Return the dtype of pools that hold this dtype of 8 bits on a platform, and `Pages.stored` of them."""
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return (jnp.uint8, Bytes(jnp.dtype(dtype).name)) if is_float and platform == "cpu" else (dtype, None)


def has_scales(dtype: Any) -> bool:
    """Return true if vectors are held in this dtype together with a scale."""
    return jnp.dtype(dtype).name in LARGEST


def round_vectors(
    x: Float[Array, "... D"], dtype: Any, scales: Float[Array, "..."] | None = None
) -> tuple[Any, Float[Array, "..."]]:
    """Return vectors in a dtype of 8 bits, and for each the float32 scale by which they are multiplied to have them
    back. A vector with NaN or infinity has the scale NaN or infinity, which shows in all that attends to it.

    With `scales` these are the scales, whatever the vectors are: larger values become the largest of the dtype, and
    infinity NaN in floats.
    """
    x = x.astype(jnp.float32)
    if scales is None:
        of_vectors = scale_of(jnp.max(jnp.abs(x), axis=-1), dtype)
    else:
        of_vectors = jnp.broadcast_to(scales, x.shape[:-1])
        largest = LARGEST[jnp.dtype(dtype).name] * of_vectors[..., None]
        x = jnp.where(jnp.isinf(x), x, jnp.clip(x, -largest, largest))
    return codes_of(x, of_vectors[..., None], dtype), of_vectors


def scale_of(largest: Any, dtype: Any) -> Any:
    """Return the scale of a vector whose largest magnitude this is; kernels call it too, as the next."""
    return jnp.maximum(largest, SMALLEST) * (1 / LARGEST[jnp.dtype(dtype).name])


def codes_of(x: Any, scale: Any, dtype: Any) -> Any:
    """Return float32 values divided by a scale that has as many axes, in a dtype of 8 bits."""
    x = x * (1 / scale)
    return (jnp.round(x) if jnp.dtype(dtype) == jnp.int8 else x).astype(dtype)
