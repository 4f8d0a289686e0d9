"""Decide which weights of a quantized checkpoint an engine holds as codes, unless configured."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxserve.layers.context import Kernel, Kernels, StepContext
from jaxserve.layers.layouts import abstract_params
from jaxserve.layers.params import ParamSpec
from jaxserve.layers.schemes import with_divisible_codes
from jaxserve.quantization.scheme import Scheme
from pallas_kernels import quantized_matmuls


def why_not_held(
    spec: ParamSpec, scheme: Scheme, *, dtype: np.dtype, kernels: Kernels, is_cpu: bool, mesh: Mesh | AbstractMesh
) -> str | None:
    """Return why a weight is dequantized when it is loaded, or None if it is held as codes.

    A CPU takes about as long for integers and 4-bit codes as for bfloat16, and less memory. A GPU holds codes if a
    kernel multiplies by them: XLA would write all dequantized values to memory in every step.
    """
    if is_cpu:
        return "XLA is slow to convert them on a CPU" if scheme.codes == "fp8" else None
    if scheme.has_order:
        return "no kernel of a whole layer takes inputs in an order of their own (act-order)"
    if kernels == "xla":
        return "XLA would make floats of them in every step"
    return _why_no_kernel(spec.shape, spec.axes, spec.num_inputs, spec.expert_size, scheme, dtype, mesh)


@functools.cache  # layers are alike
def _why_no_kernel(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    num_inputs: int,
    expert_size: int | None,
    scheme: Scheme,
    dtype: np.dtype,
    mesh: Mesh | AbstractMesh,
) -> str | None:
    """Return why no kernel multiplies by a device's codes of such a weight, or None if one does."""
    spec = ParamSpec(
        shape=shape,
        axes=axes,
        num_inputs=num_inputs,
        expert_size=expert_size,
        source=("",),
        scheme=scheme,
        dtype=dtype,
    )
    if with_divisible_codes({"": spec}, mesh)[""].scheme is None:
        return "a byte of two codes would be on two devices"
    weight = abstract_params({"": spec}, dtype=dtype, mesh=mesh)[""].on_one_device()
    row = jax.ShapeDtypeStruct((1, math.prod(weight.shape[weight.ndim - num_inputs :])), jnp.dtype(dtype))
    if expert_size is not None:
        part = weight.product(row, StepContext("sm90"), of_groups=True).part
        return part.reason if part.kernel == Kernel.XLA else None
    codes = jax.eval_shape(lambda weight: weight.quantized_matrix(num_inputs), weight)
    return f"no kernel converts {scheme}" if codes is None else quantized_matmuls.why_not(row, codes)
