"""A quantized weight as the operations of this folder take it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.quantized_matmuls.conversions import Code
from pallas_kernels.quantized_matmuls.packing import (
    BLOCK_COLUMNS,
    BLOCK_OUTPUTS,
    CODE_ROWS,
    interleave,
    pack_codes,
    pack_values,
    separate,
    unpack_codes,
    unpack_values,
)

PACKED_CODES = "int4", "e2m1"
"""Codes of 4 bits, whose weights are packed."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedMatrix:
    """A weight [N, K], or [2, F, K] for gate and up, of codes that are multiplied by scales."""

    values: Any
    """Array of int8 or float8_e4m3fn in the weight's shape, or words of blocks (see `packing`) for codes of 4 bits."""
    scales: Any
    """Float32 [*outputs, G], for each output and each 128 of K or for each output; None behind codes of 4 bits."""
    code: Code = dataclasses.field(metadata={"static": True})
    is_gated: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether the weight is gate and up; blocks of 4 bits have their rows in turns of eight."""

    @property
    def is_packed(self) -> bool:
        """Whether values are words of codes of 4 bits."""
        return self.code in PACKED_CODES

    @property
    def num_outputs(self) -> int:
        """Number of outputs, N or 2 F."""
        if self.is_packed:
            return self.values.shape[0] * BLOCK_OUTPUTS
        return self.values.shape[0] * (self.values.shape[1] if self.is_gated else 1)

    @property
    def depth(self) -> int:
        """Number of columns, K."""
        return self.values.shape[1] * BLOCK_COLUMNS if self.is_packed else self.values.shape[-1]

    @property
    def scale_rows(self) -> int:
        """Rows of scales behind the codes of a block of 4-bit codes, which is 128 over the group size."""
        return self.values.shape[2] - CODE_ROWS if self.is_packed else 0

    def dequantize(self) -> Float[Array, "..."]:
        """Return the weight in float32."""
        if not self.is_packed:
            assert self.scales is not None
            values = self.values.astype(jnp.float32)
            groups = values.reshape(*self.scales.shape, -1) if self.scales.shape[-1] > 1 else values[..., None, :]
            return (groups * self.scales[..., None]).reshape(values.shape)
        codes = unpack_codes(self.values)
        values = codes.astype(jnp.float32) - 8
        if self.code == "e2m1":
            values = jnp.asarray((*_E2M1, *(-value for value in _E2M1)), jnp.float32)[codes]
        scales = unpack_values(self.values[:, :, CODE_ROWS:])
        weight = (values.reshape(*scales.shape, -1) * scales[..., None]).reshape(values.shape)
        return jnp.stack(separate(weight)) if self.is_gated else weight


def pack_matrix(codes: Array, scales: Float[Array, "*outputs G"], *, code: Code) -> QuantizedMatrix:
    """Return a matrix of 4-bit codes [N, K], or [2, F, K], and scales of bfloat16 for each output and group of K.

    Raises NotImplementedError for sizes that blocks of 64 outputs by 128 columns do not divide, and groups that are not
    16, 32, 64 or 128 columns.
    """
    *outputs, depth = codes.shape
    group = depth // scales.shape[-1]
    if reason := why_not_packed(tuple(outputs), depth, group):
        raise NotImplementedError(reason)
    is_gated = len(outputs) == 2
    if is_gated:
        codes, scales = interleave(*codes), interleave(*scales)
    words = jnp.concatenate([pack_codes(codes), pack_values(scales, group)], axis=2)
    return QuantizedMatrix(values=words, scales=None, code=code, is_gated=is_gated)


def why_not_packed(outputs: tuple[int, ...], depth: int, group: int) -> str | None:
    """Return why 4-bit codes of such a weight cannot be packed, or None if they can."""
    if group not in (16, 32, 64, 128):
        return f"quantization groups of 16, 32, 64 or 128 columns, got {group}"
    num_outputs = outputs[0] if len(outputs) == 1 else outputs[0] * outputs[1]
    if num_outputs % BLOCK_OUTPUTS or depth % BLOCK_COLUMNS or depth % group:
        return f"outputs in multiples of 64 and K in multiples of 128, got {num_outputs} and {depth}"
    return None


def as_bytes(values: Array) -> Array:
    """Return 8-bit codes as int8 of the same bits."""
    return lax.bitcast_convert_type(values, jnp.int8)
