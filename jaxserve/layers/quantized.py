"""The weight that is stored as codes and scales, and what multiplies by it: kernels that take codes, kernels that
multiply rounded rows, on a CPU `codes_by_xla`, and otherwise XLA by the values of all codes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, override

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.layers.activations import ACTIVATIONS, Gate, gate_of
from jaxserve.layers.codes_by_xla import dequantize, multiply_codes
from jaxserve.layers.context import Kernel, Part, StepContext
from jaxserve.layers.sharding import names_of, partition_specs, shard_map
from jaxserve.layers.weight import ALONE, Product, Use, Weight, why_not_in_groups, with_one_axis
from jaxserve.quantization.scheme import Parts, Scheme
from pallas_kernels import grouped_codes, quantized_matmuls, row_quantization, scaled_matmul
from pallas_kernels.grouped_matmul import Plan
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

    @property
    @override
    def stored_as(self) -> str:
        return f"it is stored as {self.scheme}"

    @override
    def product(self, x: Any, context: StepContext, use: Use = ALONE) -> Product:
        """Choose kernels that multiply rounded rows, or convert codes."""
        if use.of_groups:
            return self._product_of_groups(x.dtype, use.activation, context)
        reason = use.why_not_fused(context)
        activation = use.activation if reason is None else None
        if (matrix := self._type_of_rounded(x.shape[0], len(x.shape) - 1)) is not None:
            return self._product_of_rounded(matrix, reason, activation)
        part = self._part_of_codes(x) if context.kernels != "xla" else Part(Kernel.XLA, self.stored_as)
        if part.kernel == Kernel.XLA:
            why = reason or part.reason if activation is None else self.stored_as
            return Product(Part(Kernel.XLA, why), self._multiply)
        return Product(Part(part.kernel, reason), functools.partial(self._multiply_codes, part.kernel, activation))

    def _part_of_codes(self, x: Any) -> Part:
        """Return which kernel converts a device's codes for rows like these."""
        num_inputs = len(x.shape) - 1
        shard = dataclasses.replace(self, order=None).on_one_device()
        codes = jax.eval_shape(lambda shard: shard.quantized_matrix(num_inputs), shard)
        if codes is None:
            return Part(Kernel.XLA, self.stored_as)
        rows = jax.ShapeDtypeStruct((x.shape[0], codes.depth), x.dtype)
        if quantized_matmuls.why_not(rows, codes) is None:
            return Part(Kernel.QUANTIZED_MATMUL)
        group = jax.eval_shape(lambda codes: jax.tree.map(lambda array: array[None], codes), codes)
        why = grouped_codes.why_not(rows, group)
        return Part(Kernel.GROUPED_CODES) if why is None else Part(Kernel.XLA, f"{self.stored_as}: {why}")

    def _product_of_rounded(
        self, matrix: QuantizedMatrix, reason: str | None, activation: str | Gate | None
    ) -> Product:
        """Return the product of rows that are rounded to the codes of `matrix`, the type of `_matrix_of_rounded`."""
        assert self.scheme.rounds_activations is not None
        by_xla = self.scheme.rounds_activations.by_xla
        unscaled = None
        if not by_xla and scaled_matmul.best_implementation(matrix) == "xla":
            unscaled = self._unscaled_product
        run = functools.partial(self._multiply_rounded, by_xla)
        if isinstance(activation, str):
            run = functools.partial(self._gated_linear_unit_of_rounded, ACTIVATIONS[activation])
        return Product(Part(Kernel.SCALED_MATMUL, reason), run, rounds_to=matrix.code, unscaled=unscaled)

    @override
    def _multiply(
        self, x: Float[Array, " T *inputs"], *, output_dtype: Any = None, leaves_partial_sums: bool = False
    ) -> Float[Array, " T *outputs"]:
        """Multiply as other weights do; on a CPU as `codes_by_xla` does, if devices have no shards of it."""
        output_dtype = output_dtype or x.dtype
        if self.is_split:
            return super()._multiply(x, output_dtype=output_dtype, leaves_partial_sums=leaves_partial_sums)
        x, columns = self._aligned(x)
        outputs = self.shape[: self.ndim - (x.ndim - 1)]

        def by_codes(x: Array, parts: Parts) -> Array:
            rows = jax.tree.map(lambda part: part.reshape(math.prod(outputs), -1), parts)
            flat = x.reshape(len(x), -1)
            y = multiply_codes(flat, self.scheme, rows, dtype=self.dtype, output_dtype=output_dtype)
            return y.reshape(len(x), *outputs)

        def whole(x: Array, parts: Parts) -> Array:
            return Weight._multiply(dataclasses.replace(columns, parts=parts), x, output_dtype=output_dtype)

        return jax.lax.platform_dependent(x, self.parts, cpu=by_codes, default=whole)

    def _multiply_codes(
        self,
        kernel: Kernel,
        activation: str | Gate | None,
        x: Float[Array, " T *inputs"],
        *,
        output_dtype: Any = None,
        leaves_partial_sums: bool = False,
    ) -> Float[Array, " T *outputs"]:
        """Multiply by the weight, or each device by its shard of it, whose codes a kernel converts."""
        num_inputs = x.ndim - 1

        def multiply(x: Array, weight: Quantized) -> Array:
            x, weight = weight._aligned(x)
            matrix = weight.quantized_matrix(num_inputs)
            assert matrix is not None
            rows = x.reshape(len(x), -1)
            matrix = matrix.ungated() if activation is None else matrix
            if kernel == Kernel.QUANTIZED_MATMUL:
                function = ACTIVATIONS[activation] if isinstance(activation, str) else None
                y = quantized_matmuls.quantized_matmul(
                    rows, matrix, activation=function, output_dtype=output_dtype, implementation="sm90"
                )
            else:
                y = grouped_codes.grouped_matmul_of_codes(
                    rows,
                    jax.tree.map(lambda array: array[None], matrix),
                    jnp.full(1, len(x), jnp.int32),
                    activation=None if activation is None else gate_of(activation),
                    output_dtype=output_dtype,
                )
            return y if activation is not None else y.reshape(len(x), *weight.shape[: weight.ndim - num_inputs])

        if self.mesh.empty:
            return multiply(x, self)
        outputs, inputs = self.spec[: self.ndim - num_inputs], self.spec[self.ndim - num_inputs :]
        outputs = outputs if activation is None else outputs[1:]
        summed_over = frozenset(names_of(inputs))
        of_sums = PartitionSpec(None, *outputs, unreduced=summed_over)
        y = shard_map(multiply, (PartitionSpec(None, *inputs), partition_specs(self)), of_sums)(x, self)
        if leaves_partial_sums or not summed_over:
            return y
        return jax.sharding.reshard(y, NamedSharding(self.mesh, PartitionSpec(None, *outputs)))

    def _product_of_groups(self, dtype: Any, activation: str | Gate | None, context: StepContext) -> Product:
        gate = None if activation is None else gate_of(activation)
        if (why := self._why_no_groups(dtype, context)) is not None:
            return Product(Part(Kernel.XLA, why), self._multiply_groups(activation))
        reason = why_not_in_groups(activation)

        def run(x: Array, group_sizes: Array, bias: Array | None, tiles: Plan | None) -> Array:
            def multiply(codes: QuantizedMatrix, bias: Array | None, gate: Gate | None) -> Array:
                return grouped_codes.grouped_matmul_of_codes(
                    x, codes, group_sizes, bias=bias, activation=gate, tiles=tiles
                )

            if gate is None or reason is None:
                return multiply(self._entries(), bias, gate)
            whole = jax.tree.map(lambda part: part.reshape(part.shape[0], -1, part.shape[-1]), self)
            return gate(*jnp.split(multiply(whole._entries(), with_one_axis(bias), None), 2, axis=1))

        return Product(Part(Kernel.GROUPED_CODES, reason), run)

    def _why_no_groups(self, dtype: Any, context: StepContext) -> str | None:
        """Return why no kernel converts the codes of all entries of the first axis for groups of rows."""
        if context.kernels == "xla" or jax.eval_shape(lambda weight: weight.quantized_matrix(1), self) is None:
            return self.stored_as
        row = jax.ShapeDtypeStruct((1, self.shape[-1]), dtype)
        return grouped_codes.why_not(row, jax.eval_shape(Quantized._entries, self))

    def _entries(self) -> QuantizedMatrix:
        return QuantizedMatrix(**self.parts._asdict(), code=self.scheme.codes)

    @override
    def take(self, rows: Int[Array, " N"]) -> Float[Array, "N ..."]:
        return self._in_order(dequantize(self.scheme, jax.tree.map(lambda part: part[rows], self.parts), self.dtype))

    def _aligned(self, x: Float[Array, " T *inputs"]) -> "tuple[Float[Array, ' T *inputs'], Quantized]":
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
    def quantized_matrix(self, num_inputs: int) -> QuantizedMatrix | None:
        if self.order is not None:
            return None
        outputs = self.shape[: self.ndim - num_inputs]
        rows = outputs if len(outputs) == 2 and outputs[0] == 2 else (math.prod(outputs),)
        parts = jax.tree.map(lambda part: part.reshape(*rows, -1), self.parts)
        return QuantizedMatrix(**parts._asdict(), code=self.scheme.codes)

    def _type_of_rounded(self, num_rows: int, num_inputs: int) -> QuantizedMatrix | None:
        """Return the type of `_matrix_of_rounded`, also for types of arrays."""
        if self.scheme.rounds_activations is None:
            return None
        return jax.eval_shape(lambda weight: weight._matrix_of_rounded(num_rows, num_inputs), self)

    def _matrix_of_rounded(self, num_rows: int, num_inputs: int) -> QuantizedMatrix | None:
        """Return what so many rows are multiplied by if they are rounded to 8 bits first; None if they are not.

        Each device has all of it.
        """
        rounded = self.scheme.rounds_activations
        if rounded is None or num_rows < rounded.min_rows or self.is_split:
            return None
        matrix = self.quantized_matrix(num_inputs)
        return None if matrix is None or scaled_matmul.why_not(matrix) is not None else matrix

    def _multiply_rounded(
        self,
        by_xla: bool,
        x: Float[Array, " T *inputs"] | QuantizedRows,
        *,
        output_dtype: Any = None,
        leaves_partial_sums: bool = False,
    ) -> Float[Array, " T *outputs"]:
        del leaves_partial_sums  # devices have all inputs
        num_inputs, dtype = x.ndim - 1, output_dtype or x.dtype

        def run(x: Array | QuantizedRows, matrix: QuantizedMatrix) -> Array:
            implementation = "xla" if by_xla else scaled_matmul.best_implementation(matrix)
            rows = _rounded(x, matrix.code, by_xla=by_xla)
            return scaled_matmul.scaled_matmul(rows, matrix, output_dtype=dtype, implementation=implementation)

        y = self._with_rounded(run, x, is_gated=False)
        return y.reshape(len(x), *self.shape[: self.ndim - num_inputs])

    def _unscaled_product(self, x: Float[Array, " T *inputs"] | QuantizedRows) -> UnscaledProduct:
        def run(x: Array | QuantizedRows, matrix: QuantizedMatrix) -> UnscaledProduct:
            return scaled_matmul.unscaled_matmul(_rounded(x, matrix.code, by_xla=False), matrix)

        return self._with_rounded(run, x, is_gated=False)

    def _gated_linear_unit_of_rounded(
        self, activation: Callable[[Array], Array], x: Float[Array, "T E"] | QuantizedRows, code: Code | None
    ) -> Float[Array, "T F"] | QuantizedRows:
        """Return activation(gate) * up; rounded to codes if `code` is one: that of the next weight."""

        def run(x: Array | QuantizedRows, matrix: QuantizedMatrix) -> Array | QuantizedRows:
            options: dict[str, Any] = {
                "activation": activation,
                "implementation": scaled_matmul.best_implementation(matrix),
            }
            rows = _rounded(x, matrix.code, by_xla=False)
            if code is None:
                return scaled_matmul.scaled_matmul(rows, matrix, **options)
            return scaled_matmul.gated_matmul_and_quantize(rows, matrix, code, **options, rounding="sm90")

        return self._with_rounded(run, x, is_gated=True)

    def _with_rounded(self, run: Callable[..., Any], x: Array | QuantizedRows, *, is_gated: bool) -> Any:
        """Return `run` of rows and the matrix of rounded ones, on each device alike."""
        matrix = self._matrix_of_rounded(len(x), x.ndim - 1)
        assert matrix is not None
        matrix = matrix if is_gated else matrix.ungated()
        if not isinstance(x, QuantizedRows):
            x = x.reshape(len(x), -1)
        if not jax.typeof(matrix.codes).sharding.mesh.empty:
            run = shard_map(run, PartitionSpec(), PartitionSpec())
        return run(x, matrix)


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
