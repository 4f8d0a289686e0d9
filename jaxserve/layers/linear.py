"""The one module in which an activation is multiplied by a weight, whatever the weight's format and sharding."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.layers.activations import ACTIVATIONS, Gate, gate_of
from jaxserve.layers.batch import Kernels
from jaxserve.layers.parts import KERNELS_OF_CODES, Kernel, experts_part, few_rows_part, linear_part, sum_part
from jaxserve.layers.peers import summed
from jaxserve.layers.sharding import partition_specs
from jaxserve.layers.weight import Weight
from pallas_kernels import grouped_codes, quantized_matmuls, small_matmul
from pallas_kernels.grouped_matmul import Plan, finished, grouped_matmul, multiply_used_groups
from pallas_kernels.peers import PeerBuffers
from pallas_kernels.row_quantization import QuantizedRows

Consumer = Literal["stream", "sum", "norm"]
"""What takes the update that a block makes: the residual stream, as one array; a sum over devices, as the partial sums
that they have; or a norm, which adds up whatever `norm.add_rms_norm` takes.
"""


def linear(
    x: Float[Array, " T *inputs"] | QuantizedRows,
    weight: Weight,
    bias: Float[Array, "*outputs"] | None = None,
    *,
    kernels: Kernels = "xla",
    output_dtype: jnp.dtype | None = None,
    leaves_partial_sums: bool = False,
) -> Float[Array, " T *outputs"]:
    """Multiply by the weight as `Weight.multiply` does, and add the bias; the result is in x's dtype by default.

    With `kernels` rows are multiplied by codes where a kernel converts them. The weight of rows that are rounded
    already is one that rounds them. Raises ValueError for `leaves_partial_sums` with a bias.
    """
    if leaves_partial_sums and bias is not None:
        raise ValueError("a bias would be in each partial sum")
    if isinstance(x, QuantizedRows):
        y = weight.multiply_rounded(x, output_dtype=output_dtype or x.dtype)
    elif (kernel := linear_part(x, weight, kernels=kernels).kernel) in KERNELS_OF_CODES:
        y = _multiply_codes(x, weight, kernel, output_dtype=output_dtype, leaves_partial_sums=leaves_partial_sums)
    else:
        y = weight.multiply(x, output_dtype=output_dtype or x.dtype, leaves_partial_sums=leaves_partial_sums)
    return y if bias is None else y + bias[None]


def residual_update(
    x: Float[Array, " T *inputs"] | QuantizedRows,
    weight: Weight,
    bias: Float[Array, " E"] | None,
    *,
    kernels: Kernels,
    peers: PeerBuffers | None,
    consumer: Consumer = "stream",
) -> Any:
    """Compute `linear` at the end of a block, in the form that its consumer takes.

    Returns an array [T, E]. For "norm" it may be unreduced, if a kernel adds up the devices' partial sums before it
    normalises, or an UnscaledProduct, where XLA computes a product of 8 bits.
    """
    if consumer == "norm" and bias is None:
        if kernels == "sm90" and (product := weight.unscaled_product(x)) is not None:
            return product
        if norm_adds_partial_sums((len(x), weight.shape[0]), x.dtype, peers):
            consumer = "sum"
    if consumer == "sum" or peers is None:
        return linear(x, weight, bias, kernels=kernels, leaves_partial_sums=consumer == "sum")
    y = summed(linear(x, weight, kernels=kernels, leaves_partial_sums=True), peers, kernels=kernels)
    return y if bias is None else y + bias[None]


def norm_adds_partial_sums(shape: tuple[int, ...], dtype: Any, peers: PeerBuffers | None) -> bool:
    """Return true if a kernel adds up the devices' partial sums of rows [T, E] and normalises the sum."""
    return sum_part(jax.ShapeDtypeStruct(shape, dtype), peers).kernel == Kernel.ALL_REDUCE


def linear_of_few_rows(
    x: Float[Array, " T inputs"],
    weight: Weight,
    *,
    kernels: Kernels,
    output_dtype: jnp.dtype | None = None,
) -> Float[Array, " T *outputs"]:
    """Compute `linear` of vectors by the kernels for few rows, if they support them.

    XLA's kernels are up to 2% faster, but XLA tries out dozens for each shape, which was most of the compilation at the
    start of an 8B model.
    """
    kernel = few_rows_part(x, weight, kernels=kernels).kernel
    if kernel != Kernel.SMALL_MATMUL:
        return linear(x, weight, kernels=kernels, output_dtype=output_dtype)

    def multiply(x: Array, weight: Array) -> Array:
        matrix = weight.reshape(-1, weight.shape[-1])
        y = small_matmul.matmul(x, matrix, output_dtype=output_dtype, implementation=kernels)
        return y.reshape(len(x), *weight.shape[:-1])

    if not weight.mesh.empty:
        multiply = jax.shard_map(
            multiply,
            in_specs=(PartitionSpec(), weight.spec),
            out_specs=PartitionSpec(None, *weight.spec[:-1]),
            check_vma=False,  # a kernel call does not say over which axes its outputs vary
        )
    return multiply(x, weight.array())


def gated_linear_of_codes(
    x: Float[Array, "T E"], weight: Weight, activation: str, kernel: Kernel
) -> Float[Array, "T F"]:
    """Return activation(gate) * up of rows and a weight [2, F, E] whose codes one of KERNELS_OF_CODES converts."""
    return _multiply_codes(x, weight, kernel, activation=activation)


def _multiply_codes(
    x: Float[Array, " T *inputs"],
    weight: Weight,
    kernel: Kernel,
    *,
    activation: str | None = None,
    output_dtype: jnp.dtype | None = None,
    leaves_partial_sums: bool = False,
) -> Float[Array, " T *outputs"]:
    """Multiply by a weight, or each device by its shard of one, whose codes one of KERNELS_OF_CODES converts."""
    num_inputs = x.ndim - 1

    def multiply(x: Array, weight: Weight) -> Array:
        x, weight = weight.aligned(x)
        matrix = weight.quantized_matrix(num_inputs)
        assert matrix is not None
        rows = x.reshape(len(x), -1)
        matrix = matrix.ungated() if activation is None else matrix
        if kernel == Kernel.QUANTIZED_MATMUL:
            function = None if activation is None else ACTIVATIONS[activation]
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

    if weight.mesh.empty:
        return multiply(x, weight)
    outputs, inputs = weight.spec[: weight.ndim - num_inputs], weight.spec[weight.ndim - num_inputs :]
    outputs = outputs if activation is None else outputs[1:]
    summed_over = frozenset(axis for axis in inputs if axis is not None)
    y = jax.shard_map(
        multiply,
        in_specs=(PartitionSpec(None, *inputs), partition_specs(weight)),
        out_specs=PartitionSpec(None, *outputs, unreduced=summed_over),
        check_vma=False,  # a kernel call does not say over which axes its outputs vary
    )(x, weight)
    if leaves_partial_sums or not summed_over:
        return y
    return jax.sharding.reshard(y, NamedSharding(weight.mesh, PartitionSpec(None, *outputs)))


def linear_of_groups(
    x: Float[Array, "M K"],
    weight: Weight,
    bias: Float[Array, "..."] | None,
    group_sizes: Int[Array, " X"],
    *,
    activation: str | Gate | None = None,
    tiles: Plan | None,
    kernels: Kernels,
) -> Float[Array, "M N"]:
    """Multiply each row by its group's matrix of a weight [X, N, K], or [X, 2, N, K] with an `activation`, which is as
    for `activations.gate_of`.

    The weight is local to the device. `tiles` are those of the kernel that `experts_part` names. Where no kernel
    converts codes, XLA makes floats of those of groups that have rows only, of one group at a time.
    """
    gate = None if activation is None else gate_of(activation)
    part = experts_part(weight, activation, dtype=x.dtype, kernels=kernels)
    if gate is not None and part.kernel != Kernel.XLA and part.reason is not None:
        whole, bias = weight.with_one_output_axis(), None if bias is None else bias.reshape(len(bias), -1)
        halves = linear_of_groups(x, whole, bias, group_sizes, tiles=tiles, kernels=kernels)
        return gate(*jnp.split(halves, 2, axis=1))
    if part.kernel == Kernel.GROUPED_CODES:
        codes = weight.quantized_entries()
        assert codes is not None
        return grouped_codes.grouped_matmul_of_codes(x, codes, group_sizes, bias=bias, activation=gate, tiles=tiles)
    if weight.why_not_plain() is None:
        return grouped_matmul(
            x, weight.array(), group_sizes, bias=bias, activation=gate, tiles=tiles, implementation=kernels
        )

    def multiply(rows: Array, group: Array) -> Array:
        return linear(rows, weight.entry(group)).reshape(len(rows), -1)

    y = multiply_used_groups(x, group_sizes, multiply, num_outputs=math.prod(weight.shape[1:-1]))
    return finished(y, group_sizes, bias=bias, activation=gate)
