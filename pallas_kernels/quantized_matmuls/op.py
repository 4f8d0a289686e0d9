"""The public operations: a matmul of few rows and a quantized weight, and the four of a layer of a decode step."""

from collections.abc import Callable
from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.implementation import Implementation, check_implementation
from pallas_kernels.layer_matmuls import Weights, layer_matmuls
from pallas_kernels.quantized_matmuls.matrix import QuantizedMatrix
from pallas_kernels.quantized_matmuls.sm90 import (
    layer_sm90,
    matmul_sm90,
    why_not_matrix,
    why_not_matrix_of_layer,
    why_not_rows,
)
from pallas_kernels.small_matmul import matmul


def why_not(x: Any, weight: QuantizedMatrix) -> str | None:
    """Return why "sm90" cannot multiply such rows by such a weight, or None if it can: arrays, or their shapes."""
    return why_not_rows(x) or why_not_matrix(weight)


def why_no_layer(heads: Any, weights: Weights) -> str | None:
    """Return why "sm90" cannot compute such a layer, or None if it can: arrays, or their shapes."""
    reasons = (why_not_matrix_of_layer(weight) for weight in weights if weight is not None)
    return why_not_rows(heads) or next((reason for reason in reasons if reason), None)


def quantized_matmul(
    x: Float[Array, "M K"],
    weight: QuantizedMatrix,
    *,
    activation: Callable[[Array], Array] | None = None,
    output_dtype: DTypeLike | None = None,
    implementation: Implementation = "xla",
) -> Float[Array, "M N"]:
    """Compute x @ weight^T, with sums in float32 and the result in x's dtype or another.

    With an `activation` the weight is [2, N, K], gate and up, and the result activation(gate) * up; it gets float32 and
    is a static argument of a jitted function.

    "sm90" is a Mosaic kernel for Hopper GPUs that reads the codes once and converts them in registers; rows stay in
    bfloat16. "xla" dequantizes the weight and runs anywhere. Raises ValueError for an unknown implementation or shapes
    that do not fit together, NotImplementedError with the reason of `why_not` for what "sm90" cannot do.
    """
    check_implementation(implementation)
    if x.ndim != 2 or x.shape[1] != weight.depth:
        raise ValueError(f"x of shape {x.shape} does not fit a weight of {weight.depth} columns")
    if weight.is_gated != (activation is not None):
        raise ValueError("a weight of gate and up and an activation go together")
    if implementation == "xla":
        dense = weight.dequantize().astype(x.dtype)
        return matmul(x, dense, activation=activation, output_dtype=output_dtype)
    if reason := why_not(x, weight):
        raise NotImplementedError(reason)
    return matmul_sm90(x, weight, activation=activation, output_dtype=output_dtype or x.dtype)


def quantized_layer_matmuls(
    heads: Float[Array, "M A"],
    residual: Float[Array, "M E"],
    weights: Weights,
    gains: tuple[Float[Array, " E"], Float[Array, " E"]],
    *,
    activation: Callable[[Array], Array],
    eps: float,
    implementation: Implementation = "xla",
) -> tuple[Float[Array, "M E"], Float[Array, "M N"]]:
    """Compute `pallas_kernels.layer_matmuls.layer_matmuls` with quantized weights; see there.

    "sm90" is one kernel whose CTAs wait for each other: it occupies a whole GPU of 132 multiprocessors. Raises as
    `quantized_matmul` does, with the reason of `why_no_layer`.
    """
    check_implementation(implementation)
    if implementation == "xla":
        dense = Weights(*(None if weight is None else weight.dequantize().astype(heads.dtype) for weight in weights))
        return layer_matmuls(heads, residual, dense, gains, activation=activation, eps=eps)
    if reason := why_no_layer(heads, weights):
        raise NotImplementedError(reason)
    return layer_sm90(heads, residual, weights, gains, activation=activation, eps=eps)
