"""A quantized weight as the operations of this folder take it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.device.codes import Code, codes_per_byte, values_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedMatrix:
    """A weight [N, K], or [2, F, K] for gate and up: (code - zero point) * scale."""

    codes: Any
    """Array in the weight's shape, of int8, float8_e4m3fn, or bytes with two codes of 4 bits along the last axis."""
    scales: Any
    """Array [*outputs, G]: a scale for each K / G columns of an output."""
    zeros: Any = None
    """Zero points of uint4, as `scales`: whole numbers of 0 to 16. None for other codes."""
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

        def by_output(array: Any) -> Any:
            return None if array is None else array.reshape(self.num_outputs, -1)

        return dataclasses.replace(
            self, codes=by_output(self.codes), scales=by_output(self.scales), zeros=by_output(self.zeros)
        )

    def dequantize(self) -> Float[Array, "..."]:
        """Return the weight in float32."""
        groups = values_of(self.codes, self.code).reshape(*self.scales.shape, -1)
        if self.zeros is not None:
            groups -= self.zeros.astype(jnp.float32)[..., None]
        return (groups * self.scales.astype(jnp.float32)[..., None]).reshape(self.shape)
