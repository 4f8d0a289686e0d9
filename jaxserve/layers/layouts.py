"""How the arrays of weights are laid out on the devices of a mesh: their shapes there, shardings and bytes."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxserve.layers.params import LeafSpec, Params, ParamSpec, leaf_specs
from jaxserve.layers.sharding import kv_copies, mesh_axes, num_shards, partition_spec, splits_by_expert


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
    """Return the Layout of every array. Raises ConfigError for an axis that does not divide over the mesh."""
    return jax.tree.map(lambda leaf: _layout(leaf, mesh), leaf_specs(specs))


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
