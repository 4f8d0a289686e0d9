"""Memory of a device that the other devices of its mesh axis write into, and where they find it.

XLA's collectives meet on the host in each step and, inside command buffers, are recorded anew in each; ours are kernels
like others, which know the addresses of their peers' memory from an array. It stays where it is for as long as the
arrays of a `PeerBuffers` live: they are never donated, and kernels write into them behind XLA's back.

A device waits in its kernel until its peers are in theirs, so that all of them must run programs with such kernels in
one order: whoever starts them starts one on all devices before the next one, also where several engines share devices.
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
"""Places for a piece in turn. A device is at most one call ahead of its peers, since it waits for what they send."""


@no_type_check  # it has shapes and shardings for leaves, too
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerBuffers:
    """Of D devices, groups of N of which are peers: what each has room for, R rows of E values from each of the others.

    Rows are sent in so many pieces, each on its own. In `jax.shard_map` each device has its own buffers: D is 1.
    """

    inbox: Shaped[Array, "D turns others R E"]
    """What the N - 1 others have sent, in the order of their ranks."""
    arrived: Int[Array, "D others R pieces"]
    """How many calls' pieces have arrived from each of them, modulo 2^32."""
    calls: Int[Array, "D R pieces"]
    """How many calls of a device have had each piece, modulo 2^32."""
    ranks: Int[Array, " D"]
    """The device's place among its peers."""
    offsets: Int[Array, "D 2 N words"]
    """Bytes from the device's own inbox, and from its own `arrived`, to those of each peer: int64 in two words."""

    axis_name: str = dataclasses.field(metadata={"static": True})
    """Of the mesh, along which peers are."""

    @property
    def num_peers(self) -> int:
        """N."""
        return self.offsets.shape[2]

    def check_axis(self, axis_name: str) -> None:
        """Raises ValueError unless the peers are those along this axis."""
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
    """Shapes and shardings: peers are the devices along `axis_name`, which send up to `num_rows` rows of `size` values,
    each in so many pieces.
    """
    num_peers, devices = mesh.shape[axis_name], math.prod(mesh.shape.values())
    sharding = NamedSharding(mesh, peer_buffers_spec(mesh))

    def of_each_device(shape: tuple[int, ...], dtype: Any) -> Any:  # stands in for an array
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
    """How `PeerBuffers` lie: each device has its own, on all axes."""
    return PartitionSpec(mesh.axis_names)


def can_reach_each_other(devices: Sequence[Any]) -> bool:
    """Whether these `jax.Device`s are GPUs of this process of which none is known not to reach another one's memory."""
    if any(device.process_index != jax.process_index() for device in devices):
        return False
    try:
        can_access_peer = ctypes.CDLL("libcuda.so.1").cuDeviceCanAccessPeer
    except (OSError, AttributeError):  # nobody knows
        return True
    for own, peer in itertools.permutations([device.local_hardware_id for device in devices], 2):
        can = ctypes.c_int()
        if can_access_peer(ctypes.byref(can), own, peer) == 0 and not can.value:
            return False
    return True


def allocate_peer_buffers(shapes: PeerBuffers) -> PeerBuffers:
    """Make what `abstract_peer_buffers` has declared, on GPUs of one process that reach each other's memory."""
    sharding = shapes.inbox.sharding
    assert isinstance(sharding, NamedSharding)
    assert isinstance(sharding.mesh, Mesh)
    inbox, arrived, calls = (
        jnp.zeros(x.shape, x.dtype, device=sharding) for x in (shapes.inbox, shapes.arrived, shapes.calls)
    )
    jax.block_until_ready((inbox, arrived, calls))  # a device that was ahead would write into what is yet to be zero
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
    """For each device, in the mesh's order, bytes from its part of x to those of its peers."""
    address_of = {shard.device: shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}
    addresses = np.vectorize(address_of.__getitem__, otypes=[np.int64])(mesh.devices)
    peers = np.expand_dims(np.moveaxis(addresses, axis, -1), axis)
    return (peers - addresses[..., None]).reshape(addresses.size, -1)
