"""Which weights of a tree of ParamSpecs are stored as codes, and by which scheme; which codes of a checkpoint an engine
holds, unless configured.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxserve.layers.context import Kernel, Kernels, StepContext
from jaxserve.layers.layouts import abstract_params
from jaxserve.layers.params import Params, ParamSpec, path_name
from jaxserve.layers.sharding import mesh_axes, num_shards, splits_by_expert
from jaxserve.quantization.scheme import ROUNDED_EARLY_ON_HOPPER, ROUNDED_ON_CPU, ROUNDED_ON_HOPPER, Scheme
from pallas_kernels import quantized_matmuls


def with_schemes(specs: Params, schemes: Mapping[str, Scheme | None], *, dtype: np.dtype) -> Params:
    """Return specs of weights that are stored as `schemes` says by path, in an engine that serves in `dtype`.

    None means the exact values of codes.
    """

    def apply(path: Any, spec: ParamSpec) -> ParamSpec:
        name = path_name(path)
        if name not in schemes:
            return spec
        scheme = schemes[name]
        if scheme is None:
            return dataclasses.replace(spec, is_exact=True)
        return dataclasses.replace(spec, scheme=scheme, dtype=spec.dtype_in(dtype))

    return jax.tree_util.tree_map_with_path(apply, specs)


def with_rounded_activations(specs: Params, codes: Collection[str], *, kernels: Kernels) -> Params:
    """Return specs of which those with such kinds of codes round activations, too, where many are multiplied.

    With our kernels that is on a Hopper GPU, else on a CPU, where XLA needs one scale an output.
    """

    def apply(spec: ParamSpec) -> ParamSpec:
        if spec.scheme is None or spec.scheme.codes not in codes or spec.expert_size is not None:
            return spec
        has_one_scale = spec.scheme.group_size is None and not spec.scheme.has_zeros
        if kernels != "sm90":
            rounded = ROUNDED_ON_CPU if has_one_scale else None
        elif spec.scheme.codes == "fp8" and has_one_scale:
            rounded = ROUNDED_EARLY_ON_HOPPER
        else:
            rounded = ROUNDED_ON_HOPPER
        if rounded is None:
            return spec
        return dataclasses.replace(spec, scheme=msgspec.structs.replace(spec.scheme, rounds_activations=rounded))

    return jax.tree.map(apply, specs)


def with_divisible_codes(specs: Params, mesh: Mesh | AbstractMesh) -> Params:
    """Return specs of which those are held as floats whose bytes, of two codes each, do not divide over devices.

    So are sharded ones whose inputs have an order, which would span devices.
    """

    def apply(spec: ParamSpec) -> ParamSpec:
        if spec.scheme is not None and spec.scheme.has_order and any(mesh_axes(axis, mesh) for axis in spec.axes):
            return dataclasses.replace(spec, scheme=None, is_exact=True)
        on = mesh_axes(spec.axes[-1], mesh) if spec.scheme is not None and spec.scheme.kind.per_byte == 2 else None
        if on is None or spec.shape[-1] // 2 % num_shards(on, mesh) == 0:
            return spec
        if spec.expert_size is not None and splits_by_expert(spec.shape[0], spec.expert_size, mesh):
            return spec
        return dataclasses.replace(spec, scheme=None, is_exact=True)

    return jax.tree.map(apply, specs)


def schemes_of(specs: Params) -> dict[str, Scheme]:
    """Return the Scheme of each weight that has one, by path such as "layers.0.mlp.down"."""
    found = jax.tree_util.tree_leaves_with_path(specs)
    return {path_name(path): spec.scheme for path, spec in found if spec.scheme is not None}


def rounded_to(specs: Params, scheme: Scheme) -> dict[str, Scheme]:
    """Return the Scheme, fitted to its shape, of each weight that `--quantization` rounds; others stay as they are."""
    marked = {
        path_name(path): scheme.fitted(spec.shape, spec.num_inputs)
        for path, spec in jax.tree_util.tree_leaves_with_path(specs)
        if spec.quantize
    }
    return {name: fitted for name, fitted in marked.items() if fitted is not None}


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
