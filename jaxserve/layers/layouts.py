"""How the weights of a tree are held on the devices of a mesh: which as codes, by which scheme; which codes of a
checkpoint at all; and the shapes, shardings and bytes of the arrays.
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
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxserve.layers.context import Kernel, Kernels, StepContext
from jaxserve.layers.params import LeafSpec, Params, ParamSpec, leaf_specs, path_name
from jaxserve.layers.sharding import kv_copies, mesh_axes, num_shards, partition_spec, splits_by_expert
from jaxserve.layers.stages import stage_meshes, stage_of
from jaxserve.layers.weight import Use
from jaxserve.quantization.scheme import ROUNDED_EARLY_ON_HOPPER, ROUNDED_ON_CPU, ROUNDED_ON_HOPPER, Scheme
from pallas_kernels import quantized_matmuls


@dataclasses.dataclass(frozen=True)
class Layout:
    """How an array of a weight is laid out on the devices of a mesh.

    It is as declared, which is how stores have it, unless there are more devices than KV heads: then several devices
    have a copy of each head (see `sharding.kv_copies`), each with a part of its queries.

    Attributes:
        shape: of the shards of all devices together.
        indices: indices into the first axes of the declared array, which give those of this one; empty if it is equal.
        repeats: how often each entry of the declared last axis is repeated. If the inputs of a device are not a
            multiple of a quantization group, its scales apply to smaller groups.
    """

    shape: tuple[int, ...]
    sharding: NamedSharding
    indices: tuple[np.ndarray, ...] = ()
    repeats: int = 1

    def put(self, declared: np.ndarray) -> jax.Array:
        """Put the declared weight on its devices."""
        return jax.device_put(self.shard(declared, (slice(None),) * len(self.shape)), self.sharding)

    def shard(self, declared: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        """Return this layout's values at `index`, reading nothing else of the declared weight."""
        if self.repeats > 1:
            *outer, last = index
            index = (*outer, slice(None))
            declared = declared[..., np.arange(self.shape[-1])[last] // self.repeats]
        if not self.indices:
            return declared[index]
        heads, *others = index
        bits = declared.view(f"u{declared.dtype.itemsize}")  # NumPy moves integers at once, and bfloat16 one by one
        return bits[tuple(indices[heads] for indices in self.indices)][:, *others].view(declared.dtype)


def layouts(specs: Params, mesh: Mesh | AbstractMesh) -> Params:
    """Return the Layout of every array, on the devices of its stage if the mesh has several. Raises ConfigError for an
    axis that does not divide over the mesh.
    """
    meshes = stage_meshes(mesh)
    if len(meshes) == 1:
        return jax.tree.map(lambda leaf: _layout(leaf, meshes[0]), leaf_specs(specs))

    def on_stage(path: Any, leaf: LeafSpec) -> Layout:
        return _layout(leaf, meshes[stage_of(path, len(specs["layers"]), len(meshes))])

    return jax.tree_util.tree_map_with_path(on_stage, leaf_specs(specs))


def _layout(spec: LeafSpec, mesh: Mesh | AbstractMesh) -> Layout:
    if spec.expert_size is not None and splits_by_expert(spec.shape[0], spec.expert_size, mesh):
        by_expert = PartitionSpec(mesh_axes("expert_ffn", mesh), *[None] * (len(spec.shape) - 1))
        return Layout(spec.shape, NamedSharding(mesh, by_expert))
    indices, repeats = _indices_of_copies(spec, mesh), _repeats_of_groups(spec, mesh)
    shape = (*indices[-1].shape, *spec.shape[len(indices) :]) if indices else spec.shape
    shape = (*shape[:-1], shape[-1] * repeats)
    sharding = NamedSharding(mesh, partition_spec(spec.axes, shape, mesh, name=spec.name))
    return Layout(shape, sharding, indices, repeats)


def _repeats_of_groups(spec: LeafSpec, mesh: Mesh | AbstractMesh) -> int:
    """Return how often each scale must be repeated, so that no group of inputs spans two devices."""
    on = None if spec.group_size is None else mesh_axes(spec.axes[-1], mesh)
    if on is None or spec.group_size is None:
        return 1
    inputs_a_device = spec.shape[-1] * spec.group_size // num_shards(on, mesh)
    return spec.group_size // math.gcd(spec.group_size, inputs_a_device)


def _indices_of_copies(spec: LeafSpec, mesh: Mesh | AbstractMesh) -> tuple[np.ndarray, ...]:
    """Return the `indices` of a Layout. Raises ConfigError if heads or devices do not divide."""
    copies = kv_copies(spec.shape[0], mesh, name=spec.name) if "kv_heads" in spec.axes else 1
    if copies == 1:
        return ()
    head, copy = np.divmod(np.arange(spec.shape[0] * copies), copies)
    if not {"members", "queries"}.intersection(spec.axes):
        return (head,)
    num_queries = spec.shape[1] - (2 if "members" in spec.axes else 0)
    partition_spec(("heads",), (spec.shape[0] * num_queries,), mesh, name=spec.name)
    queries = np.arange(num_queries).reshape(copies, -1)[copy]
    others = np.arange(num_queries, spec.shape[1])  # the key and the value
    return head[:, None], np.concatenate([queries, np.broadcast_to(others, (len(head), len(others)))], axis=1)


def abstract_params(specs: Params, *, dtype: np.dtype, mesh: Mesh | AbstractMesh) -> Params:
    """Shape, dtype and sharding of every array on the devices, without any memory."""
    return jax.tree.map(
        lambda leaf, layout: jax.ShapeDtypeStruct(layout.shape, leaf.dtype_in(dtype), sharding=layout.sharding),
        leaf_specs(specs),
        layouts(specs, mesh),
    )


def put(spec: ParamSpec, layout: Any, declared: np.ndarray) -> Any:
    """Return a weight with these values on the devices; `layout` is its entry in `layouts`."""
    return jax.tree.map(lambda values, layout: layout.put(values), spec.encode(declared), layout)


def shard_bytes(weight: jax.ShapeDtypeStruct) -> int:
    """Bytes that each device has of an array with a sharding."""
    assert weight.sharding is not None
    return math.prod(weight.sharding.shard_shape(weight.shape)) * weight.dtype.itemsize


def num_bytes(specs: Params, *, dtype: np.dtype) -> int:
    """Bytes of the whole tree, on all devices together and without copies on several of them."""
    return sum(math.prod(leaf.shape) * leaf.dtype_in(dtype).itemsize for leaf in jax.tree.leaves(leaf_specs(specs)))


def read_whole(params: Params) -> Params:
    """Return a model's weights without those of which a step reads rows: an embedding that is not the LM head too, and
    the embeddings of layers.
    """
    whole = {name: part for name, part in params.items() if name != "embed" or "lm_head" not in params}
    if of_layers := params.get("embed_per_layer"):
        whole["embed_per_layer"] = {name: part for name, part in of_layers.items() if name != "table"}
    return whole


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
        part = weight.product(row, StepContext("sm90"), Use(of_groups=True)).part
        return part.reason if part.kernel == Kernel.XLA else None
    codes = jax.eval_shape(lambda weight: weight.quantized_matrix(num_inputs), weight)
    return f"no kernel converts {scheme}" if codes is None else quantized_matmuls.why_not(row, codes)
