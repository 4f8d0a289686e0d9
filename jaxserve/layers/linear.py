"""The one module in which an activation is multiplied by a weight, whatever the weight's format and sharding."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.layers.context import PLAIN, Kernel, Part, StepContext, result
from jaxserve.layers.params import Params
from jaxserve.layers.parts import sum_part
from jaxserve.layers.peers import summed
from jaxserve.layers.weight import Use, Weight, output_sharding
from pallas_kernels.row_quantization import QuantizedRows, UnscaledProduct

Consumer = Literal["stream", "sum", "norm"]
"""What takes the update that a block makes: the residual stream, as one array; a sum over devices, as the partial sums
that they have; or a norm, which adds up whatever `norm.add_rms_norm` takes.
"""


def no_reader(block: Any, params: Params) -> None:  # noqa: ARG001
    """Return None, as the `reader` of blocks whose input is multiplied by several weights, or by none as it is."""
    return


def linear(
    x: Float[Array, " T *inputs"] | QuantizedRows,
    weight: Weight,
    bias: Float[Array, "*outputs"] | None = None,
    *,
    context: StepContext = PLAIN,
    name: str | None = None,
    output_dtype: jnp.dtype | None = None,
    leaves_partial_sums: bool = False,
    of_few_rows: bool = False,
) -> Float[Array, " T *outputs"]:
    """Multiply by the weight as its `product` chooses, and add the bias; the result is in x's dtype by default.

    If x is already quantized, the weight is one that quantizes activations. `name` is what the record calls the
    product; `leaves_partial_sums` and `of_few_rows` are as for `Product` and `Use`. Raises ValueError for
    partial sums with a bias.
    """
    if leaves_partial_sums and bias is not None:
        raise ValueError("a bias would be in each partial sum")
    product = weight.product(x, context, Use(has_bias=bias is not None, of_few_rows=of_few_rows))
    context.choose(name, product.part)
    num_outputs = weight.ndim - (x.ndim - 1)
    sharding = output_sharding(weight.sharding, num_outputs, leaves_partial_sums=leaves_partial_sums)
    makes = result((len(x), *weight.shape[:num_outputs]), output_dtype or x.dtype, sharding)
    options = {"output_dtype": output_dtype, "leaves_partial_sums": leaves_partial_sums}
    y = context.call(product.run, makes, x, **options)
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
        if (unscaled := unscaled_product(x, weight, context, name)) is not None:
            return unscaled
        if norm_adds_partial_sums(row_shape, x.dtype, context):
            consumer = "sum"
    if consumer == "sum" or context.peers is None:
        return linear(x, weight, bias, **named, leaves_partial_sums=consumer == "sum")
    y = summed(linear(x, weight, **named, leaves_partial_sums=True), context)
    return y if bias is None else y + bias[None]


def unscaled_product(x: Any, weight: Weight, context: StepContext, name: str) -> UnscaledProduct | None:
    """Compute `linear` without a bias for a kernel that scales it; None unless XLA computes a product of 8 bits."""
    if context.kernels == "xla" or (unscaled := weight.product(x, context).unscaled) is None:
        return None
    context.choose(name, Part(Kernel.SCALED_MATMUL))

    def run(x: Any) -> UnscaledProduct:
        return unscaled(x).reshape(*weight.shape[: weight.ndim - (x.ndim - 1)])

    makes = None if context.record is None else jax.eval_shape(run, x)
    return context.call(run, makes, x)


def norm_adds_partial_sums(shape: tuple[int, ...], dtype: Any, context: StepContext) -> bool:
    """Return true if a kernel adds up the devices' partial sums of rows [T, E] and normalises the sum."""
    return _sum_of(shape, dtype, context).kernel == Kernel.ALL_REDUCE


def _sum_of(shape: tuple[int, ...], dtype: Any, context: StepContext) -> Part:
    return sum_part(jax.ShapeDtypeStruct(shape, dtype), context.peers)
