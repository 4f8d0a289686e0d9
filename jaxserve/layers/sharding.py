"""Logical axis -> mesh axis: the one table that says how weights and KV are split over devices.

A mesh without the named axis, or with one device along it, leaves that axis whole.
"""

from collections.abc import Collection
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jaxserve.errors import ConfigError

MESH_AXIS_OF: dict[str, str | None] = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "key_heads": "tensor",
    "members": None,
    "ffn": "tensor",
    "experts": "expert",
    "embed": None,
}

SIZED_BY = {"tensor": ", of tensor_parallel_size"}
"""The option that says how many devices a mesh axis has."""

WORDS = {
    "heads": "query heads",
    "kv_heads": "KV heads",
    "key_heads": "key heads of layers with a state",
    "ffn": "inner values of a feed-forward",
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


def check_mesh(mesh: Mesh | AbstractMesh, used_axes: Collection[str | None], *, tensor_parallel_size: int) -> None:
    """Raise ConfigError, naming the axes, for a mesh of which a model would not use every device.

    `used_axes` are the logical axes of the model's weights. `tensor_parallel_size` must be the size of the axis that it
    sizes, or 1, its default.
    """
    splitting = sorted({name for axis, name in MESH_AXIS_OF.items() if name is not None and axis in used_axes})
    idle = [name for name, size in mesh.shape.items() if name not in splitting and size > 1]
    if idle or not set(splitting).intersection(mesh.axis_names):
        raise ConfigError(
            f"mesh has the axes {_described(mesh)}, but what splits this model are axes named "
            f"{' and '.join(map(repr, splitting))}"
            + (f": {' and '.join(map(repr, idle))} would repeat all of its work" if idle else "")
        )
    if tensor_parallel_size not in (1, mesh.shape.get("tensor", 1)):
        raise ConfigError(
            f"tensor_parallel_size is {tensor_parallel_size}, but mesh has the axes {_described(mesh)}: leave it "
            "out, or make it the size of the axis 'tensor'"
        )


def _described(mesh: Mesh | AbstractMesh) -> str:
    return ", ".join(f"{name!r} of {size}" for name, size in mesh.shape.items())


def mesh_axis(axis: str | None, mesh: Mesh | AbstractMesh) -> str | None:
    """Return the mesh axis that splits this logical axis, None if it stays whole. An unknown logical axis is a
    KeyError.
    """
    name = None if axis is None else MESH_AXIS_OF[axis]
    return name if name is not None and mesh.shape.get(name, 1) > 1 else None


def splits_by_expert(num_experts: int, expert_size: int, mesh: Mesh | AbstractMesh) -> bool:
    """Return true if devices have whole experts, instead of a shard of each expert's inner size.

    They do if kernels do not support the shards, such as 2,880 / 2 and 768 / 8, and the number of experts divides.
    """
    on = mesh_axis("ffn", mesh)
    if on is None or mesh_axis("experts", mesh) is not None:
        return False
    return expert_size % (EXPERT_MULTIPLE * mesh.shape[on]) > 0 and num_experts % mesh.shape[on] == 0


def kv_copies(num_kv_heads: int, mesh: Mesh | AbstractMesh, *, name: str) -> int:
    """Return how many devices have each KV head: more than 1 if there are more devices than heads.

    Then a device has one head and a part of its queries; K, V and their projections are on several devices. Raises
    ConfigError, which calls the heads those of `name`, if neither number is a multiple of the other.
    """
    on = mesh_axis("kv_heads", mesh)
    if on is None or num_kv_heads % mesh.shape[on] == 0:
        return 1
    if mesh.shape[on] % num_kv_heads == 0:
        return mesh.shape[on] // num_kv_heads
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

    def axis_on_mesh(axis: str | None, size: int) -> str | None:
        on = mesh_axis(axis, mesh)
        return None if on is not None and axis in WHOLE_IF_INDIVISIBLE and size % mesh.shape[on] else on

    mesh_axes = tuple(map(axis_on_mesh, axes, shape))
    taken: dict[str, str | None] = {}
    for axis, size, on in zip(axes, shape, mesh_axes, strict=True):
        if on is None:
            continue
        if on in taken:
            raise ConfigError(f"{name}: axes {taken[on]!r} and {axis!r} cannot both be split over mesh axis {on!r}")
        taken[on] = axis
        if size % mesh.shape[on]:
            raise ConfigError(
                f"{name}: {axis} of size {size} cannot be split evenly over {_devices(on, mesh)}: there are {size} "
                f"{WORDS.get(str(axis), axis)}, use {_divisors(size)} devices"
            )
    return PartitionSpec(*mesh_axes)


def _divisors(size: int) -> str:
    """List the numbers of devices, up to MAX_DEVICES_NAMED, that divide `size`, such as "1, 2 or 4"."""
    *most, last = [str(number) for number in range(1, min(size, MAX_DEVICES_NAMED) + 1) if size % number == 0]
    return f"{', '.join(most)} or {last}" if most else last


def _devices(axis: str, mesh: Mesh | AbstractMesh) -> str:
    """Name the devices along a mesh axis, for messages."""
    return f"{mesh.shape[axis]} devices (mesh axis {axis!r}{SIZED_BY.get(axis, '')})"


def partition_specs(tree: Any) -> Any:
    """Return the PartitionSpec of every array of a tree, such as `shard_map` takes for the weights in it."""
    return jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, tree)
