"""The weight that is stored as codes and scales, and what multiplies by it: kernels that take codes, kernels that
multiply rounded rows, on a CPU `codes_by_xla`, and otherwise XLA by the values of all codes.
"""

import dataclasses
import math
from typing import Any, override

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from jaxserve.layers.codes_by_xla import dequantize, multiply_codes
from jaxserve.layers.rounded import multiply_rounded, unscaled_product_of_rounded
from jaxserve.layers.sharding import partition_specs
from jaxserve.layers.weight import Weight
from jaxserve.quantization.scheme import Parts, Scheme
from pallas_kernels import scaled_matmul
from pallas_kernels.quantized_matmuls import Code, QuantizedMatrix
from pallas_kernels.row_quantization import QuantizedRows, UnscaledProduct


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized(Weight):
    """A weight stored as codes and scales, see `quantization.scheme`.

    Its codes have the logical axes; the groups of the scales are the last axis of these, split as the inputs are.
    Columns of codes may be in another order than the inputs.
    """

    parts: Parts
    scheme: Scheme = dataclasses.field(metadata={"static": True})
    value_dtype: jnp.dtype = dataclasses.field(metadata={"static": True})
    order: Any = None
    """The input of each column, [inputs]; None if columns are the inputs in order."""

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        *outer, last = self.parts.codes.shape
        return (*outer, last * self.scheme.kind.per_byte)

    @property
    @override
    def dtype(self) -> jnp.dtype:
        return self.value_dtype

    @property
    @override
    def sharding(self) -> NamedSharding:
        return jax.typeof(self.parts.codes).sharding

    @override
    def array(self) -> Float[Array, "..."]:
        """Return the values of all codes; each device makes those of its shard."""
        if not self.is_split:
            return self._in_order(dequantize(self.scheme, self.parts, self.dtype))
        run = jax.shard_map(
            lambda parts: dequantize(self.scheme, parts, self.dtype),
            in_specs=(partition_specs(self.parts),),
            out_specs=self.spec,
        )
        return run(self.parts)

    @override
    def multiply(
        self, x: Float[Array, " T *inputs"], *, output_dtype: jnp.dtype, leaves_partial_sums: bool = False
    ) -> Float[Array, " T *outputs"]:
        """Multiply as other weights do; on a CPU as `codes_by_xla` does, if devices have no shards of it.

        Many rows are rounded to 8 bits first where the scheme says so.
        """
        if (matrix := self.matrix_of_rounded(len(x), x.ndim - 1)) is not None:
            return self._multiply_rounded(x.reshape(len(x), -1), matrix, output_dtype=output_dtype).reshape(
                len(x), *self.shape[: self.ndim - (x.ndim - 1)]
            )
        if self.is_split:
            return super().multiply(x, output_dtype=output_dtype, leaves_partial_sums=leaves_partial_sums)
        x, columns = self.aligned(x)
        outputs = self.shape[: self.ndim - (x.ndim - 1)]

        def by_codes(x: Array, parts: Parts) -> Array:
            rows = jax.tree.map(lambda part: part.reshape(math.prod(outputs), -1), parts)
            flat = x.reshape(len(x), -1)
            y = multiply_codes(flat, self.scheme, rows, dtype=self.dtype, output_dtype=output_dtype)
            return y.reshape(len(x), *outputs)

        def whole(x: Array, parts: Parts) -> Array:
            return Weight.multiply(dataclasses.replace(columns, parts=parts), x, output_dtype=output_dtype)

        return jax.lax.platform_dependent(x, self.parts, cpu=by_codes, default=whole)

    @override
    def take(self, rows: Int[Array, " N"]) -> Float[Array, "N ..."]:
        return self._in_order(dequantize(self.scheme, jax.tree.map(lambda part: part[rows], self.parts), self.dtype))

    @override
    def aligned(self, x: Float[Array, " T *inputs"]) -> "tuple[Float[Array, ' T *inputs'], Quantized]":
        if self.order is None:
            return x, self
        return x.reshape(len(x), -1)[:, self.order].reshape(x.shape), dataclasses.replace(self, order=None)

    def _in_order(self, values: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return values whose last axes, the inputs, are in the order of the columns in that of the inputs."""
        if self.order is None:
            return values
        columns = jnp.zeros_like(self.order).at[self.order].set(jnp.arange(len(self.order)))
        return values.reshape(-1, len(self.order))[:, columns].reshape(values.shape)

    @override
    def entry(self, index: Int[Array, ""]) -> "Quantized":
        parts = jax.tree.map(lambda part: jax.lax.dynamic_index_in_dim(part, index, keepdims=False), self.parts)
        return dataclasses.replace(self, parts=parts)

    @override
    def with_one_output_axis(self) -> "Quantized":
        def one_axis(part: Array) -> Array:
            return part.reshape(part.shape[0], -1, part.shape[-1])

        return dataclasses.replace(self, parts=jax.tree.map(one_axis, self.parts))

    @override
    def why_not_plain(self) -> str:
        return f"it is stored as {self.scheme}"

    @override
    def quantized_entries(self) -> QuantizedMatrix | None:
        return None if self.order is not None else QuantizedMatrix(**self.parts._asdict(), code=self.scheme.codes)

    @override
    def quantized_matrix(self, num_inputs: int) -> QuantizedMatrix | None:
        if self.order is not None:
            return None
        outputs = self.shape[: self.ndim - num_inputs]
        rows = outputs if len(outputs) == 2 and outputs[0] == 2 else (math.prod(outputs),)
        parts = jax.tree.map(lambda part: part.reshape(*rows, -1), self.parts)
        return QuantizedMatrix(**parts._asdict(), code=self.scheme.codes)

    @override
    def matrix_of_rounded(self, num_rows: int, num_inputs: int) -> QuantizedMatrix | None:
        rounded = self.scheme.rounds_activations
        if rounded is None or num_rows < rounded.min_rows or self.is_split:
            return None
        matrix = self.quantized_matrix(num_inputs)
        return None if matrix is None or scaled_matmul.why_not(matrix) is not None else matrix

    @override
    def rounds_to(self, num_rows: int, num_inputs: int) -> Code | None:
        if self.scheme.rounds_activations is None:
            return None
        matrix = jax.eval_shape(lambda weight: weight.matrix_of_rounded(num_rows, num_inputs), self)
        return None if matrix is None else matrix.code

    @override
    def multiply_rounded(self, x: QuantizedRows, *, output_dtype: jnp.dtype) -> Float[Array, " T *outputs"]:
        matrix = self.matrix_of_rounded(len(x), 1)
        assert matrix is not None
        return self._multiply_rounded(x, matrix, output_dtype=output_dtype).reshape(len(x), *self.shape[:-1])

    @override
    def unscaled_product(self, x: Float[Array, " T *inputs"] | QuantizedRows) -> UnscaledProduct | None:
        matrix, rounded = self.matrix_of_rounded(len(x), x.ndim - 1), self.scheme.rounds_activations
        if matrix is None or rounded is None or rounded.by_xla or scaled_matmul.best_implementation(matrix) != "xla":
            return None
        rows = x if isinstance(x, QuantizedRows) else x.reshape(len(x), -1)
        return unscaled_product_of_rounded(rows, matrix.ungated())

    def _multiply_rounded(
        self, x: Float[Array, "T K"] | QuantizedRows, matrix: QuantizedMatrix, *, output_dtype: jnp.dtype
    ) -> Float[Array, "T N"]:
        rounded = self.scheme.rounds_activations
        by_xla = rounded is not None and rounded.by_xla
        return multiply_rounded(x, matrix.ungated(), output_dtype=output_dtype, by_xla=by_xla)
