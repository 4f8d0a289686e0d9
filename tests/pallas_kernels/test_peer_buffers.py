"""Where devices have memory for each other, and whether they can reach it."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peer_cases import make_mesh

from pallas_kernels.peers import abstract_peer_buffers, allocate_peer_buffers, buffers, can_reach_each_other


def test_where_peers_have_their_buffers():
    """Offsets lead from each device to the devices along the axis, in their order, and to no others."""
    mesh = make_mesh(4, others=2)
    peers = allocate_peer_buffers(abstract_peer_buffers(mesh, "tensor", num_rows=3, size=128, dtype=jnp.bfloat16))
    assert peers.num_peers == 4
    assert np.asarray(peers.ranks).tolist() == [0, 1, 2, 3] * 2
    offsets = np.asarray(peers.offsets).view(np.int64)[..., 0]
    for index, buffer in enumerate((peers.inbox, peers.arrived)):
        address_of = {shard.device: shard.data.unsafe_buffer_pointer() for shard in buffer.addressable_shards}
        for device, own in np.ndenumerate(mesh.devices):
            place = np.ravel_multi_index(device, mesh.devices.shape)
            found = [address_of[own] + offset for offset in offsets[place, index].tolist()]
            assert found == [address_of[peer] for peer in mesh.devices[device[0]]]
    assert not any(np.asarray(x).any() for x in (peers.arrived, peers.calls))
    assert peers.inbox.shape == (8, 2, 3, 3, 128)  # of the others only


@pytest.mark.parametrize("separate", [None, (0, 1), (3, 2)])
def test_whether_devices_reach_each_other(monkeypatch, separate):
    """The driver is asked about each pair in both directions; without a driver devices count as connected."""
    devices = [SimpleNamespace(process_index=0, local_hardware_id=index) for index in (3, 0, 1, 2)]
    asked = []

    def can_access_peer(result, own, peer):
        asked.append((own, peer))
        result._obj.value = (own, peer) != separate
        return 0

    driver = SimpleNamespace(cuDeviceCanAccessPeer=can_access_peer)
    monkeypatch.setattr(buffers.ctypes, "CDLL", lambda name: {"libcuda.so.1": driver}[name])
    assert can_reach_each_other(devices) == (separate is None)
    if separate is None:
        assert sorted(asked) == [(a, b) for a in range(4) for b in range(4) if a != b]
    elsewhere = SimpleNamespace(process_index=1, local_hardware_id=0)
    assert not can_reach_each_other([*devices, elsewhere])


def test_no_driver_to_ask(monkeypatch):
    def fail(_):
        raise OSError

    monkeypatch.setattr(buffers.ctypes, "CDLL", fail)
    devices = [SimpleNamespace(process_index=0, local_hardware_id=index) for index in range(2)]
    assert can_reach_each_other(devices)


def test_no_device_gets_buffers_before_all_are_zero(monkeypatch):
    """Otherwise one could count a call for a peer whose counters are zeroed only afterwards, and which would wait for
    ever.
    """
    mesh, awaited = make_mesh(2), []
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: awaited.extend(jax.tree.leaves(tree)))
    peers = allocate_peer_buffers(abstract_peer_buffers(mesh, "tensor", num_rows=3, size=128, dtype=jnp.bfloat16))
    assert {id(x) for x in (peers.inbox, peers.arrived, peers.calls)} <= {id(x) for x in awaited}
