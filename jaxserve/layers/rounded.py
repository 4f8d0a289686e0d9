"""Products of rows that are rounded to 8 bits by quantized weights, on each device of a mesh alike."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxserve.layers.weight import Weight
from pallas_kernels import row_quantization, scaled_matmul
from pallas_kernels.quantized_matmuls import Code, QuantizedMatrix
from pallas_kernels.row_quantization import QuantizedRows, UnscaledProduct


def multiply_rounded(
    x: Float[Array, "T K"] | QuantizedRows,
    matrix: QuantizedMatrix,
    *,
    output_dtype: jnp.dtype,
    by_xla: bool,
) -> Float[Array, "T N"]:
    """Multiply rows, rounded to 8 bits, by what `Weight.matrix_of_rounded` gives; each device has all of it."""

    def run(x: Array | QuantizedRows, matrix: QuantizedMatrix) -> Array:
        return scaled_matmul.scaled_matmul(
            _rounded(x, matrix.code, by_xla=by_xla),
            matrix,
            output_dtype=output_dtype,
            implementation=_implementation(matrix, by_xla=by_xla),
        )

    return _on_each_device(run, x, matrix)


def unscaled_product_of_rounded(x: Float[Array, "T K"] | QuantizedRows, matrix: QuantizedMatrix) -> UnscaledProduct:
    """Return what `multiply_rounded` does as XLA leaves it on a GPU."""

    def run(x: Array | QuantizedRows, matrix: QuantizedMatrix) -> UnscaledProduct:
        return scaled_matmul.unscaled_matmul(_rounded(x, matrix.code, by_xla=False), matrix)

    return _on_each_device(run, x, matrix)


def gated_linear_unit_of_rounded(
    x: Float[Array, "T E"] | QuantizedRows,
    weight: Weight,
    activation: Callable[[Array], Array],
    *,
    code: Code | None,
    by_xla: bool,
) -> Float[Array, "T F"] | QuantizedRows:
    """Return activation(gate) * up of rows that are rounded for a weight [2, F, E]; rounded to codes if `code` is one:
    that of the weight that it is multiplied by next.
    """
    matrix = weight.matrix_of_rounded(len(x), 1)
    assert matrix is not None
    implementation = _implementation(matrix, by_xla=by_xla)

    def run(x: Array | QuantizedRows, matrix: QuantizedMatrix) -> Array | QuantizedRows:
        rows = _rounded(x, matrix.code, by_xla=by_xla)
        if code is None:
            return scaled_matmul.scaled_matmul(rows, matrix, activation=activation, implementation=implementation)
        return scaled_matmul.gated_matmul_and_quantize(
            rows,
            matrix,
            code,
            activation=activation,
            implementation=implementation,
            rounding="xla" if by_xla else "sm90",
        )

    return _on_each_device(run, x, matrix)


def rows_of(x: Any, code: Code) -> QuantizedRows:
    """Return the types of the arrays of rows [M, K] that are rounded to codes; `x` is an array or its type."""
    codes = jax.ShapeDtypeStruct(x.shape, row_quantization.CODES[code], sharding=jax.typeof(x).sharding)
    scales = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
    return QuantizedRows(codes=codes, scales=scales, dtype=x.dtype)


def _rounded(x: Array | QuantizedRows, code: Code, *, by_xla: bool) -> QuantizedRows:
    if isinstance(x, QuantizedRows):
        return x
    best = row_quantization.best_implementation(x.shape[1], x.dtype, num_rows_alone=len(x))
    return row_quantization.quantize_rows(x, code, implementation="xla" if by_xla else best)


def _implementation(matrix: QuantizedMatrix, *, by_xla: bool) -> scaled_matmul.Implementation:
    return "xla" if by_xla else scaled_matmul.best_implementation(matrix)


def _on_each_device[Result](
    run: Callable[[Any, QuantizedMatrix], Result], x: Array | QuantizedRows, matrix: QuantizedMatrix
) -> Result:
    if not jax.typeof(matrix.codes).sharding.mesh.empty:
        everywhere = PartitionSpec()
        run = jax.shard_map(run, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    return run(x, matrix)
