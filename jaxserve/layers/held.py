"""Decide which weights of a quantized checkpoint an engine holds as codes, unless configured."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers.batch import Kernels
from jaxserve.layers.params import ParamSpec
from jaxserve.layers.weight import Weight
from jaxserve.quantization.scheme import Scheme
from pallas_kernels import grouped_codes, quantized_matmuls


def why_not_held(
    spec: ParamSpec, scheme: Scheme, *, dtype: np.dtype, kernels: Kernels, is_cpu: bool, num_devices: int
) -> str | None:
    """Return why a weight is dequantized when it is loaded, or None if it is held as codes.

    A CPU takes no longer for integers and 4-bit codes than for bfloat16, and less memory. A GPU holds codes if a kernel
    multiplies by them: XLA would write all dequantized values to memory in every step.
    """
    if is_cpu:
        return "XLA is slow to convert them on a CPU" if scheme.codes == "fp8" else None
    if kernels == "xla":
        return "XLA would make floats of them in every step"
    if spec.expert_size is not None:
        return _why_no_kernel_of_experts(spec.shape, scheme, dtype) or UNTRIED
    if num_devices > 1:
        return "no kernel multiplies by shards of codes"
    return _why_no_kernel(spec.shape, spec.num_inputs, scheme, dtype)


UNTRIED = "the kernel that multiplies by codes of experts has not been tried on a GPU (--no-dequantize holds them)"


@functools.cache  # layers are alike
def _why_no_kernel_of_experts(shape: tuple[int, ...], scheme: Scheme, dtype: np.dtype) -> str | None:
    """Return why no kernel multiplies by codes of experts, [X, *outputs, inputs], or None if one does."""
    found = _matrix(shape, 1, scheme, dtype, lambda weight: weight.quantized_entries())
    if found is None:
        return f"no kernel converts {scheme}"
    return grouped_codes.why_not(jax.ShapeDtypeStruct((1, shape[-1]), jnp.dtype(dtype)), found)


@functools.cache
def _why_no_kernel(shape: tuple[int, ...], num_inputs: int, scheme: Scheme, dtype: np.dtype) -> str | None:
    """Return why no kernel multiplies by codes of such a weight, or None if one does."""
    found = _matrix(shape, num_inputs, scheme, dtype, lambda weight: weight.quantized_matrix(num_inputs))
    if found is None:
        return f"no kernel converts {scheme}"
    row_size = math.prod(shape[len(shape) - num_inputs :])
    return quantized_matmuls.why_not(jax.ShapeDtypeStruct((1, row_size), jnp.dtype(dtype)), found)


def _matrix(
    shape: tuple[int, ...],
    num_inputs: int,
    scheme: Scheme,
    dtype: np.dtype,
    view: Callable[[Weight], quantized_matmuls.QuantizedMatrix | None],
) -> quantized_matmuls.QuantizedMatrix | None:
    """Return the shapes of what kernels take of a weight that is held by a scheme, or None if they do not."""
    spec = ParamSpec(
        shape=shape, axes=(None,) * len(shape), num_inputs=num_inputs, source=("",), scheme=scheme, dtype=dtype
    )
    stored = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), spec.leaves)
    return jax.eval_shape(view, stored)
