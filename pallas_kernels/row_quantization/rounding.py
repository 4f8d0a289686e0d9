"""Rows of 8-bit codes, how values are rounded to them, in XLA and in kernels alike, and what their products are."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.device.codes import Code

CODES = {"fp8": jnp.float8_e4m3fn, "int8": jnp.int8}
"""Types of the codes that rows are rounded to."""
LARGEST = {"fp8": 448.0, "int8": 127.0}
"""Magnitude of the largest code, which the largest value of a row becomes."""
SMALLEST_SCALE = 1e-12
"""Scale of a row of zeros."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedRows:
    """Rows rounded to 8 bits: codes times the scale of their row."""

    codes: Any
    """[M, K] of a type in CODES."""
    scales: Any
    """[M], float32."""
    dtype: Any = dataclasses.field(metadata={"static": True})
    """Type of the values before they were rounded."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the rows."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class UnscaledProduct:
    """A product of rows and a weight of 8 bits, [M, *outputs], not yet multiplied by the scales of both."""

    sums: Any
    """[M, *outputs]: sums of products of codes, in 16 or 32 bits."""
    row_scales: Any
    """[M], float32."""
    output_scales: Any
    """[*outputs], float32."""
    dtype: Any = dataclasses.field(metadata={"static": True})
    """Type that the product is rounded to."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the product."""
        return self.sums.shape

    def reshape(self, *outputs: int) -> "UnscaledProduct":
        """Return the product with these axes of outputs."""
        return dataclasses.replace(
            self, sums=self.sums.reshape(-1, *outputs), output_scales=self.output_scales.reshape(outputs)
        )

    def in_float32(self) -> Float[Array, " M *outputs"]:
        """Return the product before it is rounded."""
        row_scales = self.row_scales.reshape(-1, *[1] * (len(self.shape) - 1))
        return self.sums.astype(jnp.float32) * row_scales * self.output_scales[None]

    def values(self) -> Float[Array, " M *outputs"]:
        """Return the product."""
        return self.in_float32().astype(self.dtype)


def scale_of(largest: Any, code: Code) -> Any:
    """Return the scale of a row whose largest magnitude this is."""
    return jnp.maximum(largest * (1 / LARGEST[code]), SMALLEST_SCALE)


def codes_of(values: Any, scale: Any, code: Code) -> Any:
    """Return the codes of float32 values; `scale` has as many axes as they have, or none."""
    scaled = values * (1 / scale)
    return (scaled if code == "fp8" else jnp.round(scaled)).astype(CODES[code])
