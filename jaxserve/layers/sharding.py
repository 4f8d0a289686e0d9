"""Logical axis -> mesh axes: the one table that says how weights and KV are split over devices.

Mesh axes that a mesh does not have, or with one device along them, split nothing.
"""

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jaxserve.errors import ConfigError
from jaxserve.layers.stages import PIPE, num_stages, stage_meshes

DATA = "data"
"""The mesh axis over which tokens are split, see `token_shards`. Weights of layers but experts are whole along it."""

MESH_AXES_OF: dict[str, tuple[str, ...]] = {
    "vocab": (DATA, "expert", "tensor"),
    "heads": ("expert", "tensor"),
    "kv_heads": ("expert", "tensor"),
    "key_heads": ("expert", "tensor"),
    "channels": ("expert", "tensor"),
    "state_groups": ("expert", "tensor"),
    "state_heads": ("expert", "tensor"),
    "members": (),
    "queries": (),
    "ffn": ("expert", "tensor"),
    "experts": (DATA, "expert"),
    "expert_ffn": ("tensor",),
    "embed": (),
}
"""What is not of an expert is split over the devices of both axes. With whole experts on each device, all devices are
along "expert".
"""

type MeshAxes = str | tuple[str, ...] | None
"""The mesh axes that split one axis of an array, as an entry of a PartitionSpec."""

SIZED_BY = {"tensor": ", of tensor_parallel_size", "expert": ", of tensor_parallel_size with enable_expert_parallel"}
"""The option that says how many devices a mesh axis has."""

OF_STATES = frozenset({"key_heads", "channels", "state_groups", "state_heads"})
"""The axes of what layers with a state have."""

WORDS = {
    "heads": "query heads",
    "kv_heads": "KV heads",
    "key_heads": "key heads of layers with a state",
    "channels": "channels of a short convolution",
    "state_groups": "groups of heads of layers with a state",
    "state_heads": "heads of layers with a state",
    "ffn": "inner values of a feed-forward",
    "expert_ffn": "inner values of an expert",
    "experts": "experts",
}
"""What a logical axis counts, for messages."""

EXPERT_MULTIPLE = 64
"""Kernels for experts contract over multiples of this, see `pallas_kernels.grouped_matmul`."""

MAX_DEVICES_NAMED = 64
"""The largest number of devices that an error proposes."""

WHOLE_IF_INDIVISIBLE = {"vocab"}
"""Axes that stay whole if they do not divide: an odd vocabulary costs memory, an odd number of heads is an error."""


def with_explicit_axes(mesh: Mesh) -> Mesh:
    """Return the same devices with every axis explicit, as layers require: they read an array's sharding off its type.

    `jax.make_mesh` makes such meshes, the constructor of `Mesh` does not. With other axes XLA would silently move the
    KV cache between devices.
    """
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names))


def check_mesh(
    mesh: Mesh | AbstractMesh,
    used_axes: Collection[str | None],
    *,
    tensor_parallel_size: int,
    pipeline_parallel_size: int = 1,
) -> None:
    """Raise ConfigError, naming the axes, for a mesh of which a model would not use every device.

    `used_axes` are the logical axes of the model's weights. `tensor_parallel_size` must be the size of the axis that it
    sizes, or 1, its default, and so must `pipeline_parallel_size`.
    """
    if pipeline_parallel_size not in (1, num_stages(mesh)):
        raise ConfigError(
            f"pipeline_parallel_size is {pipeline_parallel_size}, but mesh has the axes {_described(mesh)}: leave it "
            f"out, or give the mesh an axis {PIPE!r} of that size"
        )
    mesh = stage_meshes(mesh)[0]
    splitting = {name for axis, names in MESH_AXES_OF.items() if axis in used_axes for name in names}
    if "experts" not in used_axes:
        if mesh.shape.get("expert", 1) > 1 or mesh.axis_names == ("expert",):
            raise ConfigError(
                f"mesh has the axes {_described(mesh)}, but this model has no experts: name that axis 'tensor'"
            )
        splitting.discard("expert")
    if mesh.shape.get(DATA, 1) > 1 and not OF_STATES.isdisjoint(used_axes):
        raise ConfigError(
            f"mesh has the axes {_described(mesh)}, but tokens of a model whose layers keep a state cannot be split "
            f"over {DATA!r}: make it an axis 'tensor' of {mesh.size}, or take several engines, by --data-parallel-size"
        )
    names = sorted(splitting)
    idle = [name for name, size in mesh.shape.items() if name not in splitting and size > 1]
    if idle or not splitting.intersection(mesh.axis_names):
        raise ConfigError(
            f"mesh has the axes {_described(mesh)}, but what splits this model are axes named "
            f"{_and(names)}"
            + (f": {_and(idle)} would repeat all of its work" if idle else "")
            + (f"; the nearest is one axis 'tensor' of {mesh.size}" if mesh.size > 1 else "")
        )
    sized = mesh.shape.get("tensor", 1) * mesh.shape.get("expert", 1)
    if tensor_parallel_size not in (1, sized):
        raise ConfigError(
            f"tensor_parallel_size is {tensor_parallel_size}, but mesh has the axes {_described(mesh)}: leave it "
            f"out, or make it {sized}, the number of devices that split a layer"
        )


def _described(mesh: Mesh | AbstractMesh) -> str:
    return ", ".join(f"{name!r} of {size}" for name, size in mesh.shape.items())


def mesh_axes(axis: str | None, mesh: Mesh | AbstractMesh) -> MeshAxes:
    """Return the mesh axes that split this logical axis, None if it stays whole. An unknown one is a KeyError."""
    names = () if axis is None else MESH_AXES_OF[axis]
    split = tuple(name for name in names if mesh.shape.get(name, 1) > 1)
    return split if len(split) > 1 else next(iter(split), None)


def shard_map(run: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return `run` on each device, with its shards of arguments and results.

    Over which axes results vary is not checked, since a kernel call does not say it.
    """
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """Return the platform of a mesh's devices; "" if it does not say."""
    device = mesh.abstract_mesh.abstract_device
    return "" if device is None else device.platform


def names_of(axes: Iterable[MeshAxes]) -> tuple[str, ...]:
    """Return the names of mesh axes in entries of a PartitionSpec."""
    return tuple(name for on in axes for name in ((on,) if isinstance(on, str) else on or ()))


def num_shards(on: MeshAxes, mesh: Mesh | AbstractMesh) -> int:
    """Return the number of devices along these mesh axes together."""
    return math.prod(mesh.shape[name] for name in names_of([on]))


def splits_by_expert(num_experts: int, expert_size: int, mesh: Mesh | AbstractMesh) -> bool:
    """Return true if devices have whole experts, instead of a shard of each expert's inner size.

    They do if kernels do not support the shards, such as 2,880 / 2 and 768 / 8, and the number of experts divides.
    """
    on = mesh_axes("expert_ffn", mesh)
    if on is None or mesh_axes("experts", mesh) is not None:
        return False
    count = num_shards(on, mesh)
    return expert_size % (EXPERT_MULTIPLE * count) > 0 and num_experts % count == 0


def kv_copies(num_kv_heads: int, mesh: Mesh | AbstractMesh, *, name: str) -> int:
    """Return how many devices have each KV head: more than 1 if there are more devices than heads.

    Then a device has one head and a part of its queries; K, V and their projections are on several devices. Raises
    ConfigError, which calls the heads those of `name`, if neither number is a multiple of the other.
    """
    on = mesh_axes("kv_heads", mesh)
    count = num_shards(on, mesh)
    if num_kv_heads % count == 0:
        return 1
    if count % num_kv_heads == 0:
        return count // num_kv_heads
    raise ConfigError(
        f"{name}: kv_heads of size {num_kv_heads} can be neither split nor repeated evenly over {_devices(on, mesh)}: "
        f"there are {num_kv_heads} KV heads, use {_divisors(num_kv_heads)} devices, or a multiple of {num_kv_heads} "
        "that divides the query heads"
    )


def partition_spec(
    axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh, *, name: str
) -> PartitionSpec:
    """Return how an array with these logical axes is laid out over the mesh; `name` is its name in errors.

    Raises ConfigError if an axis does not divide over its devices, or if two axes claim the same devices.
    """

    def axis_on_mesh(axis: str | None, size: int) -> MeshAxes:
        on = mesh_axes(axis, mesh)
        return None if axis in WHOLE_IF_INDIVISIBLE and size % num_shards(on, mesh) else on

    spec = tuple(map(axis_on_mesh, axes, shape))
    taken: dict[str, str | None] = {}
    for axis, size, on in zip(axes, shape, spec, strict=True):
        for each in names_of([on]):
            if each in taken:
                raise ConfigError(
                    f"{name}: axes {taken[each]!r} and {axis!r} cannot both be split over mesh axis {each!r}"
                )
            taken[each] = axis
        if size % num_shards(on, mesh):
            raise ConfigError(
                f"{name}: {axis} of size {size} cannot be split evenly over {_devices(on, mesh)}: there are {size} "
                f"{WORDS.get(str(axis), axis)}, use {_divisors(size)} devices"
            )
    return PartitionSpec(*spec)


def _divisors(size: int) -> str:
    """List the numbers of devices, up to MAX_DEVICES_NAMED, that divide `size`, such as "1, 2 or 4"."""
    *most, last = [str(number) for number in range(1, min(size, MAX_DEVICES_NAMED) + 1) if size % number == 0]
    return f"{', '.join(most)} or {last}" if most else last


def _devices(on: MeshAxes, mesh: Mesh | AbstractMesh) -> str:
    """Name the devices along mesh axes, for messages."""
    names = names_of([on])
    sized = SIZED_BY.get(names[0], "") if len(names) == 1 else ""
    return f"{num_shards(on, mesh)} devices (mesh {'axis' if len(names) == 1 else 'axes'} {_and(names)}{sized})"


def _and(names: Collection[str]) -> str:
    return " and ".join(map(repr, names))


def partition_specs(tree: Any) -> Any:
    """Return the PartitionSpec of every array of a tree, such as `shard_map` takes for the weights in it."""
    return jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, tree)
