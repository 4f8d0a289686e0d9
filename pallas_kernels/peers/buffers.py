"""Memory of a device that the other devices of its mesh axis write into, and its addresses.

XLA's collectives synchronize on the host in each step and, inside command buffers, are recorded again each time. Ours
are ordinary kernels, which read the addresses of their peers' memory from an array. The memory stays in place for as
long as the arrays of a `PeerBuffers` live: they are never donated, and kernels write into them without XLA's knowledge.

A device waits in its kernel until its peers are in theirs, so all devices must run programs with such kernels in the
same order: a program must be started on all devices before the next one, even if several engines use the same devices.
"""

import ctypes
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Int64, Shaped

NUM_TURNS = 2
"""Buffers used in turn for a piece. A device is at most one call ahead of its peers, since it waits for what they
send.
"""


@no_type_check  # it has shapes and shardings for leaves, too
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerBuffers:
    """Buffers of D devices in groups of N peers: each has room for R rows of E values from each of the others.

    Rows are sent in `pieces`, each separately. In `jax.shard_map` each device has its own buffers: D is 1.
    """

    inbox: Shaped[Array, "D turns others R E"]
    """Data received from the N - 1 others, in the order of their ranks."""
    arrived: Int[Array, "D others R pieces"]
    """Number of calls whose pieces have arrived from each of them, modulo 2^32."""
    calls: Int[Array, "D R pieces"]
    """Number of a device's calls that have sent each piece, modulo 2^32."""
    ranks: Int[Array, " D"]
    """The device's rank among its peers."""
    offsets: Int[Array, "D 2 N words"]
    """Bytes from the device's own inbox, and from its own `arrived`, to those of each peer: int64 in two words."""

    axis_name: str = dataclasses.field(metadata={"static": True})
    """Mesh axis along which the peers are."""

    @property
    def num_peers(self) -> int:
        """Number of peers, N."""
        return self.offsets.shape[2]

    def check_axis(self, axis_name: str) -> None:
        """Raise ValueError unless the peers are those along this axis."""
        if self.axis_name != axis_name:
            raise ValueError(f"devices along {axis_name!r}, and peers along {self.axis_name!r}")


def abstract_peer_buffers(
    mesh: Mesh | AbstractMesh,
    axis_name: str,
    *,
    num_rows: int,
    size: int,
    dtype: jax.typing.DTypeLike,
    num_pieces: int = 1,
) -> PeerBuffers:
    """Return shapes and shardings of buffers for the peers along `axis_name`.

    They send up to `num_rows` rows of `size` values, each in `num_pieces` pieces.
    """
    num_peers, devices = mesh.shape[axis_name], math.prod(mesh.shape.values())
    sharding = NamedSharding(mesh, peer_buffers_spec(mesh))

    def of_each_device(shape: tuple[int, ...], dtype: Any) -> Any:  # a shape, in place of an array
        return jax.ShapeDtypeStruct((devices, *shape), dtype, sharding=sharding)

    return PeerBuffers(
        inbox=of_each_device((NUM_TURNS, num_peers - 1, num_rows, size), dtype),
        arrived=of_each_device((num_peers - 1, num_rows, num_pieces), jnp.int32),
        calls=of_each_device((num_rows, num_pieces), jnp.int32),
        ranks=of_each_device((), jnp.int32),
        offsets=of_each_device((2, num_peers, 2), jnp.int32),
        axis_name=axis_name,
    )


def peer_buffers_spec(mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Return the sharding of `PeerBuffers`: each device has its own, on all axes."""
    return PartitionSpec(mesh.axis_names)


def can_reach_each_other(devices: Sequence[Any]) -> bool:
    """Return true if these `jax.Device`s are GPUs of this process, unless one is known not to access another's
    memory.
    """
    if any(device.process_index != jax.process_index() for device in devices):
        return False
    try:
        can_access_peer = ctypes.CDLL("libcuda.so.1").cuDeviceCanAccessPeer
    except (OSError, AttributeError):  # unknown
        return True
    for own, peer in itertools.permutations([device.local_hardware_id for device in devices], 2):
        can = ctypes.c_int()
        if can_access_peer(ctypes.byref(can), own, peer) == 0 and not can.value:
            return False
    return True


def allocate_peer_buffers(shapes: PeerBuffers) -> PeerBuffers:
    """Allocate what `abstract_peer_buffers` has declared, on GPUs of one process that access each other's memory."""
    sharding = shapes.inbox.sharding
    assert isinstance(sharding, NamedSharding)
    assert isinstance(sharding.mesh, Mesh)
    inbox, arrived, calls = (
        jnp.zeros(x.shape, x.dtype, device=sharding) for x in (shapes.inbox, shapes.arrived, shapes.calls)
    )
    # otherwise a faster device could write into memory that is yet to be zeroed
    jax.block_until_ready((inbox, arrived, calls))
    axis = sharding.mesh.axis_names.index(shapes.axis_name)
    ranks = np.indices(sharding.mesh.devices.shape, np.int32)[axis].reshape(-1)
    offsets = np.stack([_offsets(x, sharding.mesh, axis) for x in (inbox, arrived)], axis=1)
    return PeerBuffers(
        inbox=inbox,
        arrived=arrived,
        calls=calls,
        ranks=jax.device_put(ranks, sharding),
        offsets=jax.device_put(offsets.view(np.int32).reshape(shapes.offsets.shape), sharding),
        axis_name=shapes.axis_name,
    )


def _offsets(x: Array, mesh: Mesh, axis: int) -> Int64[np.ndarray, "D N"]:
    """Return, for each device in the mesh's order, the byte offsets from its part of x to those of its peers."""
    address_of = {shard.device: shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}
    addresses = np.vectorize(address_of.__getitem__, otypes=[np.int64])(mesh.devices)
    peers = np.expand_dims(np.moveaxis(addresses, axis, -1), axis)
    return (peers - addresses[..., None]).reshape(addresses.size, -1)
