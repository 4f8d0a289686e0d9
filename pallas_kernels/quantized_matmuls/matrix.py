"""A quantized weight as the operations of this folder take it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.device.codes import Code, codes_per_byte, values_of
from pallas_kernels.device.scaling import Scaling, Vectors


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedMatrix:
    """A weight [N, K], or [2, F, K] for gate and up: (code - zero point) * scale - minimum.

    Scales and minimums may be small numbers, which factors multiply.
    """

    codes: Any
    """Array in the weight's shape, of int8, float8_e4m3fn, or bytes with two codes of 4 bits along the last axis."""
    scales: Any
    """Array [*outputs, G]: a scale for each K / G columns of an output."""
    zeros: Any = None
    """Zero points, as `scales`: whole numbers of 0 to 16 for uint4, of -128 to 127 for int8. None for other codes."""
    minimums: Any = None
    """Array as `scales`, or None."""
    factors: Any = None
    """Array [*outputs, L] of float32 or float16: a factor of the scales of each K / L columns; or None."""
    minimum_factors: Any = None
    """Factors of the minimums, as `factors`."""
    code: Code = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        *outputs, size = self.codes.shape
        return (*outputs, size * codes_per_byte(self.code))

    @property
    def is_gated(self) -> bool:
        """True if the weight is gate and up."""
        return len(self.codes.shape) == 3

    @property
    def num_outputs(self) -> int:
        """Number of outputs, N or 2 F."""
        return self.shape[0] * (self.shape[1] if self.is_gated else 1)

    @property
    def depth(self) -> int:
        """Number of columns, K."""
        return self.shape[-1]

    @property
    def group_size(self) -> int:
        """Columns that have a scale in common."""
        return self.depth // self.scales.shape[-1]

    def ungated(self) -> "QuantizedMatrix":
        """Return it as [N, K], even if it is gate and up."""
        return jax.tree.map(lambda array: array.reshape(self.num_outputs, -1), self)

    def dequantize(self) -> Float[Array, "..."]:
        """Return the weight in float32."""
        groups = values_of(self.codes, self.code).reshape(*self.scales.shape, -1)
        if self.zeros is not None:
            groups -= self.zeros.astype(jnp.float32)[..., None]
        groups *= _factored(self.scales, self.factors)[..., None]
        if self.minimums is not None:
            groups -= _factored(self.minimums, self.minimum_factors)[..., None]
        return groups.reshape(self.shape)


def _factored(small: Array, factors: Array | None) -> Float[Array, "..."]:
    """Return scales or minimums in float32, times their factors."""
    values = small.astype(jnp.float32)
    if factors is None:
        return values
    return (values.reshape(*factors.shape, -1) * factors.astype(jnp.float32)[..., None]).reshape(values.shape)


def scaling_of(weight: QuantizedMatrix, name: str) -> Scaling:
    """Return what the codes of a weight are scaled by, as kernels are compiled for it; arrays' names end in `name`."""

    def vectors(kind: str) -> Vectors | None:
        array = getattr(weight, kind)
        if array is None:
            return None
        return Vectors(f"{kind}_{name}", jnp.dtype(array.dtype).name, weight.depth // array.shape[-1])

    scales, *others = map(vectors, ("scales", "zeros", "minimums", "factors", "minimum_factors"))
    assert scales is not None
    return Scaling(weight.code, weight.depth, scales, *others)


def vectors_of_outputs(weight: QuantizedMatrix, scaling: Scaling) -> dict[str, Array]:
    """Return the arrays of `scaling_of` by name, [outputs, groups]; numbers of a byte are int8, others as they are."""
    arrays = (weight.scales, weight.zeros, weight.minimums, weight.factors, weight.minimum_factors)
    found = [array.reshape(-1, array.shape[-1]) for array in arrays if array is not None]
    return {
        each.name: lax.bitcast_convert_type(array, jnp.int8) if array.dtype.itemsize == 1 else array
        for each, array in zip(scaling.all_vectors, found, strict=True)
    }


def why_not_factors(weight: QuantizedMatrix, block: int) -> str | None:
    """Return why a kernel with blocks of `block` columns does not take the factors of scales, or None if it does."""
    if weight.factors is None:
        return None
    factored = weight.depth // weight.factors.shape[-1]
    if factored == weight.depth or factored % block == 0 or (block % factored == 0 and factored >= weight.group_size):
        return None
    return f"factors of all columns, of parts of {block} or of multiples, got {factored}"
