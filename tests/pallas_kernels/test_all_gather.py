"""Columns of several devices put together: on CPU devices, compiled for H200s that are not there, and run on two."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from jax.sharding import NamedSharding, PartitionSpec
from peer_cases import make_mesh, needs_two_gpus

from pallas_kernels.all_gather import all_gather, num_pieces, why_not
from pallas_kernels.deviceless import compile_for_h200, h200_mesh
from pallas_kernels.peers import abstract_peer_buffers, allocate_peer_buffers, peer_buffers_spec

BY_COLUMN = PartitionSpec(None, "tensor")


def buffers(mesh, num_rows, size, dtype=jnp.float32):
    pieces = num_pieces(size, dtype)
    return abstract_peer_buffers(mesh, "tensor", num_rows=num_rows, size=size, dtype=dtype, num_pieces=pieces)


def gather(mesh, *, implementation, num_calls=1):
    """Return the result of the last of `num_calls` calls, whose columns change from call to call with what others have
    sent.
    """

    def run(part, peers):
        for _ in range(num_calls):
            whole = all_gather(part, peers, axis_name="tensor", implementation=implementation)
            part = part + whole[:, :1] - whole[:, -1:]
        return whole

    specs = BY_COLUMN, peer_buffers_spec(mesh)
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)


def columns(mesh, num_rows, size):
    whole = np.random.default_rng(num_rows).integers(-9, 9, (num_rows, size * mesh.shape["tensor"]))
    return whole, jax.device_put(jnp.asarray(whole, jnp.float32), NamedSharding(mesh, BY_COLUMN))


@pytest.mark.parametrize("num_devices", [2, 4])
def test_xla(num_devices):
    mesh = make_mesh(num_devices)
    whole, parts = columns(mesh, 3, 6)
    np.testing.assert_array_equal(jax.jit(gather(mesh, implementation="xla"))(parts, None), whole)


@pytest.mark.parametrize(
    ("num_devices", "num_rows", "size"), quick_first([(2, 1, 64_128), (2, 512, 64_128), (8, 5, 15_904)])
)
def test_on_h200s_it_is_one_kernel_that_xla_takes_for_any_other(num_devices, num_rows, size):
    """See the test of this name for sums."""
    mesh = h200_mesh((num_devices,), ("tensor",))
    peers = buffers(mesh, 512, size)
    part = jax.ShapeDtypeStruct((num_rows, num_devices * size), jnp.float32, sharding=NamedSharding(mesh, BY_COLUMN))
    program = compile_for_h200(gather(mesh, implementation="sm90", num_calls=6), part, peers)
    assert program.spill_bytes == 0
    assert program.thunks == {"kCommandBuffer": 1}
    for buffer in (peers.inbox, peers.arrived, peers.calls):
        assert program.copies_of((1, *buffer.shape[1:])) == []
    assert all(4 * 128 * 8 * -(-kernel.num_registers // 8) <= 65_536 for kernel in program.kernels)


def test_what_it_takes():
    mesh = make_mesh(2)
    peers = buffers(mesh, 4, 256)
    for shape, dtype, sent, takes in [
        ((4, 256), jnp.float32, peers, True),
        ((5, 256), jnp.float32, peers, False),
        ((4, 128), jnp.float32, peers, False),
        ((4, 256), jnp.int32, peers, False),
        ((4, 5), jnp.float32, buffers(mesh, 4, 5), False),  # 20 bytes
    ]:
        assert (why_not(jax.ShapeDtypeStruct(shape, dtype), sent) is None) == takes
    x = jnp.zeros((5, 256), jnp.float32)
    call = functools.partial(all_gather, x, peers, axis_name="tensor")
    with pytest.raises(NotImplementedError, match=r"room for 4 rows of 256 .* in 1 pieces, got 5 of 256 in float32"):
        call(implementation="sm90")
    with pytest.raises(ValueError, match="devices along 'other', and peers along 'tensor'"):
        all_gather(x, peers, axis_name="other")


@pytest.mark.parametrize(
    ("implementation", "size"),
    [("xla", 36), *(pytest.param("sm90", size, marks=needs_two_gpus) for size in (64_128, 36, 8192, 75_968))],
)
def test_whole_numbers(implementation, size):
    """In calls of one row up to all that fit, again and again."""
    mesh, num_calls, most = make_mesh(2), 7, 512 if implementation == "sm90" else 8
    peers = allocate_peer_buffers(buffers(mesh, most, size))
    run = jax.jit(gather(mesh, implementation=implementation, num_calls=num_calls))
    for num_rows in (1, 7, most, 3, most - 1) * (3 if implementation == "sm90" else 1):
        whole, parts = columns(mesh, num_rows, size)
        want = whole.astype(np.float32)
        for _ in range(num_calls - 1):
            want = want + want[:, :1] - want[:, -1:]
        for shard in run(parts, peers).addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), want)
