"""The public operation: rows and weights of 8 bits, multiplied by the tensor cores for 8 bits and scaled afterwards."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from pallas_kernels.quantized_matmuls import Code, QuantizedMatrix
from pallas_kernels.scaled_matmul.sm90 import CODES, scaled_matmul_sm90, why_not_matrix, why_not_values

Implementation = Literal["xla", "sm90"]

LARGEST = {"fp8": 448.0, "int8": 127.0}
"""Magnitude of the largest code, which the largest value of a row becomes."""
SMALLEST_SCALE = 1e-12
"""Scale of a row of zeros."""


def quantize_rows(x: Float[Array, "M K"], code: Code) -> tuple[Shaped[Array, "M K"], Float[Array, " M"]]:
    """Return the codes that values are rounded to, and the scale of each row, in float32."""
    values = x.astype(jnp.float32)
    scales = jnp.maximum(jnp.max(jnp.abs(values), axis=1) / LARGEST[code], SMALLEST_SCALE)
    scaled = values / scales[:, None]
    return (scaled if code == "fp8" else jnp.round(scaled)).astype(CODES[code]), scales


def why_not(weight: QuantizedMatrix) -> str | None:
    """Return why rows are not multiplied by such a weight, in any implementation, or None if they are.

    `weight` has arrays, or their shapes.
    """
    return why_not_values(weight) if weight.group_size == weight.depth else why_not_matrix(weight)


def best_implementation(weight: QuantizedMatrix) -> Implementation:
    """Return the faster implementation on a Hopper GPU for a weight that `why_not` takes: see NOTES.md."""
    has_one_scale = weight.group_size == weight.depth
    return "xla" if (weight.code == "fp8" and has_one_scale) or why_not_matrix(weight) is not None else "sm90"


def scaled_matmul(
    x: Float[Array, "M K"],
    weight: QuantizedMatrix,
    *,
    activation: Callable[[Array], Array] | None = None,
    output_dtype: DTypeLike | None = None,
    implementation: Implementation = "xla",
) -> Float[Array, "M N"]:
    """Compute x @ weight^T with each row of x rounded to 8 bits, in the kind of codes that the weight has.

    Products of codes are summed up to float32's precision, at least after each 128 columns, and then multiplied by both
    scales. The result is in x's dtype or another. With an `activation` the weight is [2, N, K], gate and up, and the
    result activation(gate) * up; it gets float32 and is a static argument of a jitted function.

    "sm90" is a Mosaic kernel for Hopper GPUs. "xla" is for weights with one scale an output: cuBLAS on a GPU, whose
    sums are rounded to `output_dtype` before they are scaled. Raises ValueError for an unknown implementation or shapes
    that do not fit together, NotImplementedError for weights that the implementation does not take, with the reason.
    """
    if implementation not in get_args(Implementation):
        known = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"unknown implementation {implementation!r}, there is {known}")
    if x.shape[1] != weight.depth:
        raise ValueError(f"x of shape {x.shape} does not fit a weight of {weight.depth} columns")
    if weight.is_gated != (activation is not None):
        raise ValueError("a weight of gate and up and an activation go together")
    reason = why_not_matrix(weight) if implementation == "sm90" else why_not(weight)
    if implementation == "xla" and reason is None and weight.group_size != weight.depth:
        reason = f"one scale an output, got one for {weight.group_size} of {weight.depth} columns"
    if reason is not None:
        raise NotImplementedError(f"a scaled matmul takes {reason}")
    dtype = jnp.dtype(output_dtype or x.dtype)
    codes, scales = quantize_rows(x, weight.code)
    if implementation == "sm90":
        return scaled_matmul_sm90(codes, scales, weight, activation=activation, output_dtype=dtype)
    return _scaled_matmul_xla(codes, scales, weight, activation=activation, output_dtype=dtype)


def _scaled_matmul_xla(
    x: Shaped[Array, "M K"],
    x_scales: Float[Array, " M"],
    weight: QuantizedMatrix,
    *,
    activation: Callable[[Array], Array] | None,
    output_dtype: Any,
) -> Float[Array, "M N"]:
    # cuBLAS promotes sums of FP8 products at the highest precision only: without, those of 14,336 positive products
    # were 20% too small on an H200.
    sums = jax.lax.dot_general(
        x,
        weight.codes.reshape(-1, weight.depth),
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if weight.code == "fp8" else None,
        preferred_element_type=output_dtype if weight.code == "fp8" else jnp.int32,
    )
    y = sums.astype(jnp.float32) * x_scales[:, None] * weight.scales.astype(jnp.float32).reshape(1, -1)
    if activation is not None:
        gate, up = jnp.split(y, 2, axis=1)
        y = activation(gate) * up
    return y.astype(output_dtype)
