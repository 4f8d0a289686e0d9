"""The public operations: rows and weights of 8 bits, multiplied by tensor cores for 8 bits and scaled afterwards."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import row_quantization
from pallas_kernels.implementation import Implementation, check_implementation
from pallas_kernels.quantized_matmuls import Code, QuantizedMatrix
from pallas_kernels.row_quantization import (
    QuantizedRows,
    UnscaledProduct,
    gate_and_quantize,
    quantize_rows,
    why_not_gated,
)
from pallas_kernels.scaled_matmul.sm90 import scaled_matmul_sm90, why_not_matrix, why_not_values


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
    x: QuantizedRows,
    weight: QuantizedMatrix,
    *,
    activation: Callable[[Array], Array] | None = None,
    output_dtype: DTypeLike | None = None,
    implementation: Implementation = "xla",
) -> Float[Array, "M N"]:
    """Compute x @ weight^T of rows and a weight of the same kind of codes.

    Products of codes are summed up to float32's precision, at least after each 128 columns, and then multiplied by both
    scales. The result is in x's dtype or another. With an `activation` the weight is [2, N, K], gate and up, and the
    result activation(gate) * up; it gets float32 and is a static argument of a jitted function.

    "sm90" is a Mosaic kernel for Hopper GPUs. "xla" is for weights with one scale an output: cuBLAS on a GPU, whose
    sums are rounded to `output_dtype` before they are scaled. Raises ValueError for an unknown implementation or shapes
    and codes that do not fit together, NotImplementedError for weights that the implementation does not take, with the
    reason.
    """
    _check(x, weight, has_activation=activation is not None, implementation=implementation)
    dtype = jnp.dtype(output_dtype or x.dtype)
    if implementation == "sm90":
        return scaled_matmul_sm90(x.codes, x.scales, weight, activation=activation, output_dtype=dtype)
    y = _product(x, weight, dtype).in_float32()
    if activation is not None:
        gate, up = jnp.split(y, 2, axis=1)
        y = activation(gate) * up
    return y.astype(dtype)


def unscaled_matmul(x: QuantizedRows, weight: QuantizedMatrix) -> UnscaledProduct:
    """Return what `scaled_matmul` of XLA multiplies by the scales. Errors are those of `scaled_matmul`."""
    _check(x, weight, has_activation=False, implementation="xla")
    return _product(x, weight, x.dtype)


def gated_matmul_and_quantize(
    x: QuantizedRows,
    weight: QuantizedMatrix,
    code: Code,
    *,
    activation: Callable[[Array], Array],
    implementation: Implementation = "xla",
    rounding: Implementation = "xla",
) -> QuantizedRows:
    """Return the codes that `scaled_matmul` with an activation is rounded to, which the next matmul takes.

    `rounding` is the implementation of the rounding, where it takes such rows. Errors are those of `scaled_matmul`.
    """
    if implementation == "sm90":
        y = scaled_matmul(x, weight, activation=activation, implementation=implementation)
        best = row_quantization.best_implementation(y.shape[1], y.dtype, num_rows_alone=len(y))
        return quantize_rows(y, code, implementation=best if rounding == "sm90" else "xla")
    _check(x, weight, has_activation=True, implementation=implementation)
    product = _product(x, weight, x.dtype)
    is_taken = why_not_gated(product) is None
    return gate_and_quantize(product, code, activation=activation, implementation=rounding if is_taken else "xla")


def _check(x: QuantizedRows, weight: QuantizedMatrix, *, has_activation: bool, implementation: str) -> None:
    check_implementation(implementation)
    if x.shape[1] != weight.depth:
        raise ValueError(f"x of shape {x.shape} does not fit a weight of {weight.depth} columns")
    if weight.is_gated != has_activation:
        raise ValueError("a weight of gate and up and an activation go together")
    reason = why_not_matrix(weight) if implementation == "sm90" else why_not(weight)
    if implementation == "xla" and reason is None and weight.group_size != weight.depth:
        reason = f"one scale an output, got one for {weight.group_size} of {weight.depth} columns"
    if reason is not None:
        raise NotImplementedError(f"a scaled matmul takes {reason}")
    if x.codes.dtype != weight.codes.dtype:
        raise ValueError(f"x has codes of {x.codes.dtype}, the weight of {weight.codes.dtype}")


def _product(x: QuantizedRows, weight: QuantizedMatrix, dtype: Any) -> UnscaledProduct:
    """Return the product by XLA, its sums in `dtype`, or in int32 for integers."""
    # cuBLAS promotes sums of FP8 products at the highest precision only: without, those of 14,336 positive products
    # were 20% too small on an H200.
    sums = jax.lax.dot_general(
        x.codes,
        weight.codes.reshape(-1, weight.depth),
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if weight.code == "fp8" else None,
        preferred_element_type=dtype if weight.code == "fp8" else jnp.int32,
    )
    scales = weight.scales.astype(jnp.float32).reshape(-1)
    return UnscaledProduct(sums=sums, row_scales=x.scales, output_scales=scales, dtype=jnp.dtype(dtype))
