"""Sums over devices with what follows them, against float64 on CPU devices; the Hopper kernel compiled for H200s that
are not there, and run on two where there are two.
"""

import functools
import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.all_reduce import (
    abstract_peer_buffers,
    all_reduce_add_rms_norm,
    allocate_peer_buffers,
    can_reach_each_other,
    peer_buffers_spec,
    supports,
)
from pallas_kernels.all_reduce import peers as peers_module
from pallas_kernels.deviceless import compile_for_h200, h200_mesh

EPS = 1e-5
needs_two_gpus = pytest.mark.skipif(
    jax.default_backend() != "gpu" or jax.device_count() < 2, reason="needs two GPUs that reach each other's memory"
)


def make_mesh(num_devices, others=1):
    devices = jax.devices()[: num_devices * others]
    return jax.make_mesh((others, num_devices), ("other", "tensor"), (AxisType.Explicit,) * 2, devices=devices)


def layers(mesh, *, implementation, num_calls=1):
    """What `num_calls` calls make of x, parts [devices * T, E], weight and peers: each has other parts."""
    everywhere, parts = PartitionSpec(), PartitionSpec("tensor")

    def run(x, part, weight, peers):
        device = jax.lax.axis_index("tensor").astype(part.dtype)
        for call in range(num_calls):
            x, normed = all_reduce_add_rms_norm(
                x, part, weight, peers, axis_name="tensor", eps=EPS, implementation=implementation
            )
            part = normed * (device + call + 1)
        return x, normed

    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(everywhere, parts, everywhere, peer_buffers_spec(mesh)),
        out_specs=everywhere,
        check_vma=False,
    )


def arrays(mesh, num_rows, size, dtype=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    num_devices = mesh.shape["tensor"]

    def put(shape, *spec):
        x = jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    return put((num_rows, size)), put((num_devices * num_rows, size), "tensor"), put((size,))


@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_xla(num_devices, dtype):
    mesh = make_mesh(num_devices)
    x, parts, weight = arrays(mesh, 3, 96, dtype)
    total, normed = jax.jit(layers(mesh, implementation="xla"))(x, parts, weight, None)
    x, parts, weight = (np.asarray(a, np.float64) for a in (x, parts, weight))
    want = x + parts.reshape(num_devices, *x.shape).sum(axis=0)
    rtol = 1e-5 if dtype == jnp.float32 else 2**-6
    np.testing.assert_allclose(np.asarray(total, np.float64), want, rtol=rtol, atol=4 * rtol)
    want = want / np.sqrt((want**2).mean(axis=1, keepdims=True) + EPS) * weight
    np.testing.assert_allclose(np.asarray(normed, np.float64), want, rtol=rtol, atol=4 * rtol)


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


@pytest.mark.parametrize("separate", [None, (0, 1), (3, 2)])
def test_whether_devices_reach_each_other(monkeypatch, separate):
    """As the driver says, asked of each pair in both directions; a machine without one is given the benefit."""
    devices = [SimpleNamespace(process_index=0, local_hardware_id=index) for index in (3, 0, 1, 2)]
    asked = []

    def can_access_peer(result, own, peer):
        asked.append((own, peer))
        result._obj.value = (own, peer) != separate
        return 0

    driver = SimpleNamespace(cuDeviceCanAccessPeer=can_access_peer)
    monkeypatch.setattr(peers_module.ctypes, "CDLL", lambda name: {"libcuda.so.1": driver}[name])
    assert can_reach_each_other(devices) == (separate is None)
    if separate is None:
        assert sorted(asked) == [(a, b) for a in range(4) for b in range(4) if a != b]
    elsewhere = SimpleNamespace(process_index=1, local_hardware_id=0)
    assert not can_reach_each_other([*devices, elsewhere])


def test_no_driver_to_ask(monkeypatch):
    def fail(_):
        raise OSError

    monkeypatch.setattr(peers_module.ctypes, "CDLL", fail)
    devices = [SimpleNamespace(process_index=0, local_hardware_id=index) for index in range(2)]
    assert can_reach_each_other(devices)


def test_no_device_gets_buffers_before_all_are_zero(monkeypatch):
    """Else one could count a call for a peer whose counters become zero only then, and which would wait for ever."""
    mesh, awaited = make_mesh(2), []
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: awaited.extend(jax.tree.leaves(tree)))
    peers = allocate_peer_buffers(abstract_peer_buffers(mesh, "tensor", num_rows=3, size=128, dtype=jnp.bfloat16))
    assert {id(x) for x in (peers.inbox, peers.arrived, peers.calls)} <= {id(x) for x in awaited}


@pytest.mark.parametrize(("num_devices", "num_rows", "size"), [(2, 1, 4096), (2, 64, 896), (8, 16, 16384)])
def test_on_h200s_it_is_one_kernel_that_xla_takes_for_any_other(num_devices, num_rows, size):
    """In one command buffer, without spills, and with the peers' buffers where they are."""
    mesh = h200_mesh((num_devices,), ("tensor",))
    peers = abstract_peer_buffers(mesh, "tensor", num_rows=64, size=size, dtype=jnp.bfloat16)

    def shape(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    arguments = shape((num_rows, size)), shape((num_devices * num_rows, size), "tensor"), shape((size,)), peers
    program = compile_for_h200(layers(mesh, implementation="sm90", num_calls=6), *arguments)
    assert program.spill_bytes == 0
    assert program.thunks == {"kCommandBuffer": 1}
    assert program.copies_of((1, 2, num_devices, 64, size)) == []
    assert program.copies_of((1, num_devices, 64)) == program.copies_of((1, 64)) == []


def test_what_it_takes():
    mesh = make_mesh(2)
    peers = abstract_peer_buffers(mesh, "tensor", num_rows=4, size=256, dtype=jnp.bfloat16)
    odd = abstract_peer_buffers(mesh, "tensor", num_rows=4, size=192, dtype=jnp.bfloat16)
    for shape, dtype, buffers, takes in [
        ((4, 256), jnp.bfloat16, peers, True),
        ((5, 256), jnp.bfloat16, peers, False),
        ((4, 128), jnp.bfloat16, peers, False),
        ((4, 256), jnp.float16, peers, False),
        ((4, 192), jnp.bfloat16, odd, False),
    ]:
        assert supports(jax.ShapeDtypeStruct(shape, dtype), buffers) == takes

    call = functools.partial(all_reduce_add_rms_norm, axis_name="tensor", eps=EPS, implementation="sm90")
    x, weight = jnp.zeros((5, 256), jnp.bfloat16), jnp.zeros(256, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="room for 4 rows of 256 values in bfloat16, got 5 of 256"):
        call(x, x, weight, peers)
    with pytest.raises(NotImplementedError, match="got 4 of 256 in bfloat16 and float32"):
        call(x[:4], x[:4].astype(jnp.float32), weight, peers)
    with pytest.raises(NotImplementedError, match="rows of 192 values"):
        call(x[:4, :192], x[:4, :192], weight[:192], odd)
    with pytest.raises(ValueError, match="a sum over 'other', and peers along 'tensor'"):
        all_reduce_add_rms_norm(x, x, weight, peers, axis_name="other", eps=EPS)
    unchecked = inspect.unwrap(all_reduce_add_rms_norm)  # the test suite's type check would refuse it first
    with pytest.raises(ValueError, match="unknown implementation 'nccl'"):
        unchecked(x, x, weight, peers, axis_name="tensor", eps=EPS, implementation="nccl")


@pytest.mark.parametrize(
    ("implementation", "size"),
    [("xla", 896), pytest.param("sm90", 896, marks=needs_two_gpus), pytest.param("sm90", 4096, marks=needs_two_gpus)],
)
def test_whole_numbers(implementation, size):
    """Whose sums are exact: in calls of one row to all that there is room for, again and again."""
    mesh, num_calls = make_mesh(2), 21
    peers = allocate_peer_buffers(abstract_peer_buffers(mesh, "tensor", num_rows=256, size=size, dtype=jnp.bfloat16))

    def calls(x, part, weight, peers):
        """One after the other, each with other parts."""
        device, found = jax.lax.axis_index("tensor"), []
        for call in range(num_calls):
            other = part + ((call * (device + 1)) % 5).astype(part.dtype)
            found.append(
                all_reduce_add_rms_norm(
                    x, other, weight, peers, axis_name="tensor", eps=EPS, implementation=implementation
                )
            )
            x = x + 0 * found[-1][0]
        return found

    everywhere, by_device = PartitionSpec(), PartitionSpec("tensor")
    specs = everywhere, by_device, everywhere, peer_buffers_spec(mesh)
    run = jax.jit(jax.shard_map(calls, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=False))
    rng = np.random.default_rng(0)
    for num_rows in (1, 64, 3, 256, 16, 255) * (20 if implementation == "sm90" else 1):
        x, parts = (rng.integers(-8, 9, (count * num_rows, size)) for count in (1, 2))
        arguments = (
            jax.device_put(jnp.asarray(array, jnp.bfloat16), NamedSharding(mesh, spec))
            for array, spec in zip((x, parts, np.ones(size)), specs, strict=False)
        )
        for call, (total, normed) in enumerate(run(*arguments, peers)):
            want = x + parts.reshape(2, num_rows, size).sum(axis=0) + call % 5 + 2 * call % 5
            scale = 1 / np.sqrt((want**2).mean(axis=1, keepdims=True) + EPS)
            for shard in total.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data, np.float64), want)
            for shard in normed.addressable_shards:
                np.testing.assert_allclose(np.asarray(shard.data, np.float64), want * scale, rtol=2**-7)
