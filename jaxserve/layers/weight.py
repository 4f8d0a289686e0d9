"""Weights as layers see them: matrices that activations are multiplied by, whatever arrays they are stored in.

The interface, and the weight that is stored as its values; `quantized` has the one that is stored as codes. A Weight is
a pytree node. Its leaves are the arrays on the devices, or what stands for them: shapes, layouts, arrays on the host,
partition specs. Layers call its methods, such as `multiply` and `take`, and never look at the leaves.
"""

import abc
import dataclasses
from typing import Any, override

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.layers.sharding import names_of
from pallas_kernels.quantized_matmuls import Code, QuantizedMatrix
from pallas_kernels.row_quantization import QuantizedRows, UnscaledProduct


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

    def with_one_output_axis(self) -> "Weight":
        """Return a weight [X, *outputs, K] as [X, outputs, K]; as plain values where a format has no way of its own."""
        values = self.array()
        return Dense(values.reshape(values.shape[0], -1, values.shape[-1]))

    @abc.abstractmethod
    def why_not_plain(self) -> str | None:
        """Return why kernels for plain matrices do not multiply by this weight, or None if they may read `array`."""

    def quantized_matrix(self, num_inputs: int) -> QuantizedMatrix | None:  # noqa: ARG002 (for formats)
        """Return codes and scales as kernels for quantized matrices take them, or None if it has none.

        The last `num_inputs` axes are its columns. Outputs of two axes whose first has a size of 2 are gate and up.
        """
        return None

    def quantized_entries(self) -> QuantizedMatrix | None:
        """Return codes and scales of all entries of the first axis as kernels for groups of rows take them, or None if
        there are none.
        """
        return None

    def matrix_of_rounded(self, num_rows: int, num_inputs: int) -> QuantizedMatrix | None:  # noqa: ARG002 (for formats)
        """Return what `quantized_matrix` does if so many rows are rounded to 8 bits before they are multiplied.

        None if they are multiplied as they are.
        """
        return None

    def rounds_to(self, num_rows: int, num_inputs: int) -> Code | None:  # noqa: ARG002 (for formats)
        """Return the codes that so many rows are rounded to before they are multiplied, or None."""
        return None

    def multiply_rounded(self, x: QuantizedRows, *, output_dtype: jnp.dtype) -> Float[Array, " T *outputs"]:
        """Multiply rows that were rounded to the codes of `rounds_to`. Raises NotImplementedError if that is None."""
        raise NotImplementedError("no rows are rounded for this weight")

    def unscaled_product(
        self,
        x: Float[Array, " T *inputs"] | QuantizedRows,  # noqa: ARG002 (for formats)
    ) -> UnscaledProduct | None:
        """Return the product of rounded rows as XLA leaves it on a GPU; None if rows are not rounded, or a kernel
        multiplies them.
        """
        return None

    def aligned(self, x: Float[Array, " T *inputs"]) -> "tuple[Float[Array, ' T *inputs'], Weight]":
        """Return activations in the order in which the weight has its inputs, and the weight in that order."""
        return x, self

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

    def multiply(
        self, x: Float[Array, " T *inputs"], *, output_dtype: jnp.dtype, leaves_partial_sums: bool = False
    ) -> Float[Array, " T *outputs"]:
        """Contract all axes of `x` but the first with the last axes of the weight, by XLA.

        Contracting a sharded axis ends in an all-reduce and a replicated result, otherwise the output is sharded as the
        weight is. With `leaves_partial_sums` there is no all-reduce: the result is "unreduced" over the axis, and each
        device has a partial sum. float32 operands are multiplied in full float32, even if the hardware rounds them by
        default.
        """
        num_inputs = x.ndim - 1
        outputs = self.shape[: self.ndim - num_inputs]
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

    @override
    def why_not_plain(self) -> None:
        return None
