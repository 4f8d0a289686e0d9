"""Weights as layers see them: matrices that activations are multiplied by, whatever arrays they are stored in.

The interface, and the weight that is stored as its values; `quantized` has the one that is stored as codes. A Weight is
a pytree node. Its leaves are the arrays on the devices, or what stands for them: shapes, layouts, arrays on the host,
partition specs. Layers call its methods, such as `product` and `take`, and never look at the leaves.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.layers.activations import ACTIVATIONS, FUSED_ACTIVATIONS, Gate, fuses, gate_of, why_not_activation
from jaxserve.layers.context import NO_KERNELS, PLAIN, Kernel, Kernels, Part, StepContext
from jaxserve.layers.sharding import names_of, shard_map
from pallas_kernels import gated_linear_unit, small_matmul
from pallas_kernels.grouped_matmul import Plan, finished, grouped_matmul, multiply_used_groups
from pallas_kernels.quantized_matmuls import Code, QuantizedMatrix
from pallas_kernels.row_quantization import UnscaledProduct


class Use(NamedTuple):
    """What a product is for.

    Attributes:
        activation: follows the product, by a weight of gate and up [2, F, E], as the entries of one of groups are.
        has_bias: a bias is added to the product.
        of_few_rows: there are rarely many of the rows: XLA's kernels for them are up to 2% faster, but XLA tries out
            dozens for each shape, which was most of the compilation at the start of an 8B model.
        of_groups: the weight is one of experts, local to a device, of which each row has one.
    """

    activation: str | Gate | None = None
    has_bias: bool = False
    of_few_rows: bool = False
    of_groups: bool = False

    def why_not_fused(self, context: StepContext) -> str | None:
        """Return why no kernel computes a product with its activation, or one of few rows, whatever the weight is."""
        if self.of_few_rows:
            return NO_KERNELS if context.kernels == "xla" else "it has a bias" if self.has_bias else None
        if self.activation is None:
            return None
        if self.has_bias:
            return "it has a bias"
        if not isinstance(self.activation, str) or self.activation not in FUSED_ACTIVATIONS:
            return why_not_activation(self.activation)
        return NO_KERNELS if context.kernels == "xla" else None


ALONE = Use()


class Weight(abc.ABC):
    """A matrix of logical shape [*outputs, *inputs]; inside `shard_map`, the device's shard of one.

    It keeps a checkpoint's order: nothing is transposed while loading, and both operands of a matmul are contiguous
    along the contracted axes, as fp8 tensor cores require. With XLA's bf16 matmuls on an H200 (8B shape, whole step
    without attention) [*inputs, *outputs] is 2 to 4% faster up to 64 tokens, and no faster from 256 on.
    """

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""

    @property
    @abc.abstractmethod
    def dtype(self) -> jnp.dtype:
        """The type of the values that `array` returns."""

    @property
    @abc.abstractmethod
    def sharding(self) -> NamedSharding:
        """The sharding of the logical matrix; its mesh is empty if there is none."""

    @abc.abstractmethod
    def array(self) -> Float[Array, "..."]:
        """Return the logical matrix as one array."""

    @abc.abstractmethod
    def take(self, rows: Int[Array, " N"]) -> Float[Array, "N ..."]:
        """Return the entries of the first axis at these indices, as an embedding does."""

    @abc.abstractmethod
    def entry(self, index: Int[Array, ""]) -> "Weight":
        """Return the entry of the first axis at an index, such as one of the experts, as a weight of its own."""

    @property
    def stored_as(self) -> str | None:
        """What kernels for plain matrices do not read, such as "it is stored as int4"; None for plain values."""
        return "it is not stored as its values"

    def product(self, x: Any, context: StepContext, use: Use = ALONE) -> "Product":  # noqa: ARG002 (for formats)
        """Return how rows like `x` [T, *inputs] are multiplied: by XLA, where a format has nothing better.

        `x` is an array, QuantizedRows, or the type of either.
        """
        if use.of_groups:
            return Product(Part(Kernel.XLA, self.stored_as), self._multiply_groups(use.activation))
        return Product(Part(Kernel.XLA, use.why_not_fused(context) or self.stored_as), self._multiply)

    def quantized_matrix(self, num_inputs: int) -> QuantizedMatrix | None:  # noqa: ARG002 (for formats)
        """Return codes and scales as kernels of several weights take them, or None if it has none.

        The last `num_inputs` axes are its columns. Outputs of two axes whose first has a size of 2 are gate and up.
        """
        return None

    @property
    def ndim(self) -> int:
        """Number of logical axes."""
        return len(self.shape)

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The devices that have it; an empty mesh for a single one."""
        return self.sharding.mesh

    @property
    def spec(self) -> PartitionSpec:
        """The mesh axis that splits each logical axis."""
        return self.sharding.spec

    @property
    def is_split(self) -> bool:
        """True if the weight is sharded over more than one device."""
        return any(axis is not None for axis in self.spec)

    @property
    def shard(self) -> jax.ShapeDtypeStruct:
        """The logical shape of one device's shard."""
        return jax.ShapeDtypeStruct(
            self.shape if self.mesh.empty else self.sharding.shard_shape(self.shape), self.dtype
        )

    def on_one_device(self) -> "Weight":
        """Return the shapes of the arrays that a device has of the weight, as a weight that is not sharded."""

        def shard(array: Any) -> jax.ShapeDtypeStruct:
            sharding = jax.typeof(array).sharding
            shape = array.shape if sharding.mesh.empty else sharding.shard_shape(array.shape)
            return jax.ShapeDtypeStruct(shape, array.dtype)

        return jax.tree.map(shard, self)

    def _multiply(
        self, x: Float[Array, " T *inputs"], *, output_dtype: Any = None, leaves_partial_sums: bool = False
    ) -> Float[Array, " T *outputs"]:
        """Contract all axes of `x` but the first with the last axes of the weight, by XLA; see `Product.run`.

        float32 operands are multiplied in full float32, even if the hardware rounds them by default.
        """
        output_dtype = output_dtype or x.dtype
        outputs = self.shape[: self.ndim - (x.ndim - 1)]
        weight = self.array()
        out_sharding = output_sharding(self.sharding, len(outputs), leaves_partial_sums=leaves_partial_sums)
        if not self.is_split:
            # As a plain matrix: in every step XLA on a CPU would transpose a weight of more axes. With 100 M parameters
            # in float32 a token costs 14.7 ms this way, 101 ms the other (jaxserve bench latency, 2 cores).
            x = x.reshape(x.shape[0], -1)
            weight = weight.reshape(-1, x.shape[1])
            out_sharding = output_sharding(self.sharding, 1)
        contracted = (tuple(range(1, x.ndim)), tuple(range(weight.ndim - (x.ndim - 1), weight.ndim)))

        def product(x: Array, weight: Array) -> Array:
            return jax.lax.dot_general(
                x,
                weight,
                (contracted, ((), ())),
                precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
                preferred_element_type=output_dtype,
                out_sharding=out_sharding,
            )

        def of_two_rows(x: Array, weight: Array) -> Array:
            return product(jnp.concatenate([x, jnp.zeros_like(x)]), weight)[:1]

        if len(x) == 1 and x.dtype == jnp.bfloat16 and not self.is_split:
            # XLA's library for CPUs has no products with a vector; XLA's own take nine times as long as with two rows.
            y = jax.lax.platform_dependent(x, weight, cpu=of_two_rows, default=product)
        else:
            y = product(x, weight)
        return y if y.shape[1:] == outputs else y.reshape(x.shape[0], *outputs)

    def _multiply_groups(self, activation: str | Gate | None) -> Callable[..., Array]:
        """Return `Product.run` of groups by XLA: it makes floats of those that have rows only, of one at a time."""

        def run(x: Array, group_sizes: Array, bias: Array | None, tiles: Plan | None) -> Array:
            del tiles

            def multiply(rows: Array, group: Array) -> Array:
                entry = self.entry(group)
                return entry.product(rows, PLAIN).run(rows).reshape(len(rows), -1)

            y = multiply_used_groups(x, group_sizes, multiply, num_outputs=math.prod(self.shape[1:-1]))
            return finished(y, group_sizes, bias=bias, activation=None if activation is None else gate_of(activation))

        return run


class Product(NamedTuple):
    """How rows are multiplied by a weight: `Weight.product` chooses, while a program is traced."""

    part: Part
    """The kernel, and why there is no faster one. If there is a reason, an activation that was asked for is left out,
    but for groups."""
    run: Callable[..., Any]
    """(x, output_dtype=None, leaves_partial_sums=False) -> [T, *outputs], in x's dtype by default.

    Contracting a sharded axis ends in an all-reduce and a replicated result, otherwise the output is sharded as the
    weight is. With `leaves_partial_sums` there is no all-reduce: the result is "unreduced" over the axis, and each
    device has a partial sum. With an activation it is (x) -> [T, F], or if `rounds_to` is not None, (x, code) ->
    QuantizedRows if `code` is not None. For groups, (x, group sizes, bias, tiles) -> [T, outputs]: bias and activation
    are included, and `tiles` are those of the kernel, or None."""
    rounds_to: Code | None = None
    """What rows are rounded to before they are multiplied; None if they are not. `run` takes rows of such codes."""
    unscaled: Callable[[Any], UnscaledProduct] | None = None
    """(x) -> the product as XLA leaves it on a GPU; None if rows are not rounded, or a kernel multiplies them."""


def output_sharding(
    weight: NamedSharding, num_outputs: int, *, leaves_partial_sums: bool = False
) -> NamedSharding | None:
    """Return the sharding of a result: tokens are replicated, outputs are sharded as in the weight; None without a
    mesh.
    """
    if weight.mesh.empty:
        return None
    spec = weight.spec
    unreduced = frozenset(names_of(spec[num_outputs:])) if leaves_partial_sums else frozenset()
    return NamedSharding(weight.mesh, PartitionSpec(None, *spec[:num_outputs], unreduced=unreduced))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense(Weight):
    """A weight stored as its values."""

    values: Any
    """An array, or what stands for it."""

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    @override
    def dtype(self) -> jnp.dtype:
        return self.values.dtype

    @property
    @override
    def sharding(self) -> NamedSharding:
        return jax.typeof(self.values).sharding

    @override
    def array(self) -> Float[Array, "..."]:
        return self.values

    @override
    def take(self, rows: Int[Array, " N"]) -> Float[Array, "N ..."]:
        return self.values[rows]

    @override
    def entry(self, index: Int[Array, ""]) -> "Dense":
        return Dense(jax.lax.dynamic_index_in_dim(self.values, index, keepdims=False))

    @property
    @override
    def stored_as(self) -> None:
        return None

    @override
    def product(self, x: Any, context: StepContext, use: Use = ALONE) -> Product:
        """Choose kernels for plain matrices.

        For matrices of 16 bits XLA's kernels are the fastest with many rows, and tried out for each shape.
        """
        if use.of_groups:
            return self._product_of_groups(use.activation, context)
        reason = use.why_not_fused(context)
        if reason is None and use.of_few_rows:
            reason = self._why_not_few_rows(x)
            if reason is None:
                return Product(Part(Kernel.SMALL_MATMUL), functools.partial(self._multiply_few_rows, context.kernels))
        elif reason is None and isinstance(use.activation, str):
            reason = gated_linear_unit.why_not(x, self.shard)
            if reason is None:
                run = functools.partial(self._gated_linear_unit, ACTIVATIONS[use.activation], context.kernels)
                return Product(Part(Kernel.GATED_LINEAR_UNIT), run)
        return Product(Part(Kernel.XLA, reason), self._multiply)

    def _why_not_few_rows(self, x: Any) -> str | None:
        shard = self.shard
        if shard.shape[-1] != self.shape[-1]:
            return "devices have parts of its inputs"
        matrix = jax.ShapeDtypeStruct((math.prod(shard.shape[:-1]), shard.shape[-1]), shard.dtype)
        return small_matmul.why_not(x, matrix)

    def _multiply_few_rows(
        self, kernels: Kernels, x: Array, *, output_dtype: Any = None, leaves_partial_sums: bool = False
    ) -> Array:
        del leaves_partial_sums  # devices have all inputs

        def multiply(x: Array, weight: Array) -> Array:
            matrix = weight.reshape(-1, weight.shape[-1])
            y = small_matmul.matmul(x, matrix, output_dtype=output_dtype, implementation=kernels)
            return y.reshape(len(x), *weight.shape[:-1])

        return self._on_each_device(multiply, PartitionSpec(None, *self.spec[:-1]))(x, self.values)

    def _gated_linear_unit(self, activation: Callable[[Array], Array], kernels: Kernels, x: Array) -> Array:
        run = functools.partial(gated_linear_unit.gated_linear_unit, activation=activation, implementation=kernels)
        out_spec = PartitionSpec() if self.mesh.empty else PartitionSpec(None, self.spec[1])
        return self._on_each_device(run, out_spec)(x, self.values)

    def _on_each_device(self, run: Callable[..., Array], out_specs: PartitionSpec) -> Callable[..., Array]:
        """Return a kernel of all rows and each device's shard of the weight."""
        return run if self.mesh.empty else shard_map(run, (PartitionSpec(), self.spec), out_specs)

    def _product_of_groups(self, activation: str | Gate | None, context: StepContext) -> Product:
        kernels, gate = context.kernels, None if activation is None else gate_of(activation)
        part = Part(Kernel.XLA, NO_KERNELS)
        if kernels != "xla":
            part = Part(Kernel.GROUPED_MATMUL, why_not_in_groups(activation))

        def run(x: Array, group_sizes: Array, bias: Array | None, tiles: Plan | None) -> Array:
            def multiply(weight: Array, bias: Array | None, gate: Gate | None) -> Array:
                return grouped_matmul(
                    x, weight, group_sizes, bias=bias, activation=gate, tiles=tiles, implementation=kernels
                )

            if gate is None or part.kernel == Kernel.XLA or part.reason is None:
                return multiply(self.values, bias, gate)
            halves = multiply(self.values.reshape(len(self.values), -1, self.shape[-1]), with_one_axis(bias), None)
            return gate(*jnp.split(halves, 2, axis=1))

        return Product(part, run)


def why_not_in_groups(activation: str | Gate | None) -> str | None:
    """Return why kernels for groups of rows leave out an activation, or None if they do not."""
    return None if activation is None or fuses(activation) else why_not_activation(activation)


def with_one_axis(bias: Array | None) -> Array | None:
    """Return the biases of gate and up of each group in one axis."""
    return None if bias is None else bias.reshape(len(bias), -1)
