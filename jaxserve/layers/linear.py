"""The one module in which an activation is multiplied by a weight, whatever the weight's format and sharding."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.layers.activations import ACTIVATIONS, Gate, gate_of
from jaxserve.layers.context import PLAIN, Kernel, Part, StepContext, result
from jaxserve.layers.params import Params
from jaxserve.layers.parts import KERNELS_OF_CODES, experts_part, few_rows_part, linear_part, sum_part
from jaxserve.layers.peers import summed
from jaxserve.layers.sharding import names_of, partition_specs
from jaxserve.layers.weight import Weight, output_sharding
from pallas_kernels import grouped_codes, quantized_matmuls, small_matmul
from pallas_kernels.grouped_matmul import Plan, finished, grouped_matmul, multiply_used_groups
from pallas_kernels.row_quantization import QuantizedRows, UnscaledProduct

Consumer = Literal["stream", "sum", "norm"]
"""What takes the update that a block makes: the residual stream, as one array; a sum over devices, as the partial sums
that they have; or a norm, which adds up whatever `norm.add_rms_norm` takes.
"""


def linear(
    x: Float[Array, " T *inputs"] | QuantizedRows,
    weight: Weight,
    bias: Float[Array, "*outputs"] | None = None,
    *,
    context: StepContext = PLAIN,
    name: str | None = None,
    output_dtype: jnp.dtype | None = None,
    leaves_partial_sums: bool = False,
) -> Float[Array, " T *outputs"]:
    """Multiply by the weight as `Weight.multiply` does, and add the bias; the result is in x's dtype by default.

    With kernels, rows are multiplied by codes where one converts them. If x is already quantized, the weight is one
    that quantizes activations. `name` is what the record calls the product. Raises ValueError for
    `leaves_partial_sums` with a bias.
    """
    if leaves_partial_sums and bias is not None:
        raise ValueError("a bias would be in each partial sum")
    kernel = context.choose(name, linear_part(x, weight, kernels=context.kernels))
    dtype = output_dtype or x.dtype
    num_outputs = weight.ndim - (x.ndim - 1)
    sharding = output_sharding(weight.sharding, num_outputs, leaves_partial_sums=leaves_partial_sums)
    makes = result((len(x), *weight.shape[:num_outputs]), dtype, sharding)
    if isinstance(x, QuantizedRows):
        y = context.call(weight.multiply_rounded, makes, x, output_dtype=dtype)
    elif kernel in KERNELS_OF_CODES:
        options = {"output_dtype": output_dtype, "leaves_partial_sums": leaves_partial_sums}
        y = context.call(_multiply_codes, makes, x, weight, kernel, **options)
    else:
        y = context.call(weight.multiply, makes, x, output_dtype=dtype, leaves_partial_sums=leaves_partial_sums)
    return y if bias is None else y + bias[None]


def residual_update(
    x: Float[Array, " T *inputs"] | QuantizedRows,
    params: Params,
    name: str,
    context: StepContext,
    consumer: Consumer = "stream",
) -> Any:
    """Compute `linear` at the end of a block, by the weight and the bias of this name, in the form that its consumer
    takes.

    Returns an array [T, E]. For "norm" it may be unreduced, if a kernel adds up the devices' partial sums before it
    normalises, or an UnscaledProduct, where XLA computes a product of 8 bits.
    """
    weight, bias = params[name], params.get(f"{name}_bias")
    named: dict[str, Any] = {"context": context, "name": name}
    row_shape = (len(x), weight.shape[0])
    if weight.is_split:
        context.choose("sums over devices", _sum_of(row_shape, x.dtype, context), is_product=False)
    if consumer == "norm" and bias is None:
        if (product := _unscaled_product(x, weight, context, name)) is not None:
            return product
        if norm_adds_partial_sums(row_shape, x.dtype, context):
            consumer = "sum"
    if consumer == "sum" or context.peers is None:
        return linear(x, weight, bias, **named, leaves_partial_sums=consumer == "sum")
    y = summed(linear(x, weight, **named, leaves_partial_sums=True), context)
    return y if bias is None else y + bias[None]


def _unscaled_product(
    x: Float[Array, " T *inputs"] | QuantizedRows, weight: Weight, context: StepContext, name: str
) -> UnscaledProduct | None:
    if context.kernels == "xla" or weight.rounds_to(len(x), x.ndim - 1) is None:
        return None
    if context.record is None:
        return weight.unscaled_product(x)
    product = jax.eval_shape(weight.unscaled_product, x)
    if product is not None:
        context.choose(name, Part(Kernel.SCALED_MATMUL))
    return context.call(weight.unscaled_product, product, x)


def norm_adds_partial_sums(shape: tuple[int, ...], dtype: Any, context: StepContext) -> bool:
    """Return true if a kernel adds up the devices' partial sums of rows [T, E] and normalises the sum."""
    return _sum_of(shape, dtype, context).kernel == Kernel.ALL_REDUCE


def _sum_of(shape: tuple[int, ...], dtype: Any, context: StepContext) -> Part:
    return sum_part(jax.ShapeDtypeStruct(shape, dtype), context.peers)


def linear_of_few_rows(
    x: Float[Array, " T inputs"],
    weight: Weight,
    bias: Float[Array, "*outputs"] | None = None,
    *,
    context: StepContext,
    name: str | None = None,
    output_dtype: jnp.dtype | None = None,
) -> Float[Array, " T *outputs"]:
    """Compute `linear` of vectors by the kernels for few rows, if they support them.

    XLA's kernels are up to 2% faster, but XLA tries out dozens for each shape, which was most of the compilation at the
    start of an 8B model.
    """
    part = few_rows_part(x, weight, kernels=context.kernels, has_bias=bias is not None)
    if context.choose(name, part) != Kernel.SMALL_MATMUL:
        return linear(x, weight, bias, context=context, output_dtype=output_dtype)

    def multiply(x: Array, weight: Array) -> Array:
        matrix = weight.reshape(-1, weight.shape[-1])
        y = small_matmul.matmul(x, matrix, output_dtype=output_dtype, implementation=context.kernels)
        return y.reshape(len(x), *weight.shape[:-1])

    if not weight.mesh.empty:
        multiply = jax.shard_map(
            multiply,
            in_specs=(PartitionSpec(), weight.spec),
            out_specs=PartitionSpec(None, *weight.spec[:-1]),
            check_vma=False,  # a kernel call does not say over which axes its outputs vary
        )
    makes = result((len(x), *weight.shape[:-1]), output_dtype or x.dtype, output_sharding(weight.sharding, x.ndim - 1))
    return context.call(multiply, makes, x, weight.array())


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
    summed_over = frozenset(names_of(inputs))
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
    context: StepContext,
) -> Float[Array, "M N"]:
    """Multiply each row by its group's matrix of a weight [X, N, K], or [X, 2, N, K] with an `activation`, which is as
    for `activations.gate_of`.

    The weight is local to the device. `tiles` are those of the kernel that `experts_part` names. Where no kernel
    converts codes, XLA makes floats of those of groups that have rows only, of one group at a time.
    """
    gate = None if activation is None else gate_of(activation)
    part = experts_part(weight, activation, dtype=x.dtype, kernels=context.kernels)
    if gate is not None and part.kernel != Kernel.XLA and part.reason is not None:
        whole, bias = weight.with_one_output_axis(), None if bias is None else bias.reshape(len(bias), -1)
        halves = linear_of_groups(x, whole, bias, group_sizes, tiles=tiles, context=context)
        return gate(*jnp.split(halves, 2, axis=1))
    if part.kernel == Kernel.GROUPED_CODES:
        codes = weight.quantized_entries()
        assert codes is not None
        return grouped_codes.grouped_matmul_of_codes(x, codes, group_sizes, bias=bias, activation=gate, tiles=tiles)
    if weight.why_not_plain() is None:
        return grouped_matmul(
            x, weight.array(), group_sizes, bias=bias, activation=gate, tiles=tiles, implementation=context.kernels
        )

    def multiply(rows: Array, group: Array) -> Array:
        return linear(rows, weight.entry(group)).reshape(len(rows), -1)

    y = multiply_used_groups(x, group_sizes, multiply, num_outputs=math.prod(weight.shape[1:-1]))
    return finished(y, group_sizes, bias=bias, activation=gate)
