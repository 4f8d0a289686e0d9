"""Sums over devices with what follows them, against float64 on CPU devices; the Hopper kernel compiled for H200s that
are not there, and run on two where there are two.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from jax.sharding import NamedSharding, PartitionSpec
from peer_cases import make_mesh, needs_two_gpus

from pallas_kernels.all_reduce import all_reduce, all_reduce_add_rms_norm, why_not
from pallas_kernels.deviceless import compile_for_h200, h200_mesh
from pallas_kernels.peers import abstract_peer_buffers, allocate_peer_buffers, peer_buffers_spec

EPS = 1e-5


def layers(mesh, *, implementation, num_calls=1):
    """Return the results of `num_calls` calls for x, parts [devices * T, E], weight and peers: each call has other
    parts.
    """
    everywhere, parts = PartitionSpec(), PartitionSpec("tensor")

    def run(x, part, weight, peers):
        device = jax.lax.axis_index("tensor").astype(part.dtype)
        for call in range(num_calls):
            x, normed = all_reduce_add_rms_norm(
                x, part, weight, peers, axis_name="tensor", eps=EPS, implementation=implementation
            )
            part = normed * (device + call + 1)
        summed = all_reduce(part, peers, axis_name="tensor", implementation=implementation)
        return x, normed, summed

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
    total, normed, summed = jax.jit(layers(mesh, implementation="xla"))(x, parts, weight, None)
    again = np.asarray(normed, np.float64) * sum(range(1, num_devices + 1))
    np.testing.assert_allclose(np.asarray(summed, np.float64), again, rtol=2**-6 if dtype == jnp.bfloat16 else 1e-5)
    x, parts, weight = (np.asarray(a, np.float64) for a in (x, parts, weight))
    want = x + parts.reshape(num_devices, *x.shape).sum(axis=0)
    rtol = 1e-5 if dtype == jnp.float32 else 2**-6
    np.testing.assert_allclose(np.asarray(total, np.float64), want, rtol=rtol, atol=4 * rtol)
    want = want / np.sqrt((want**2).mean(axis=1, keepdims=True) + EPS) * weight
    np.testing.assert_allclose(np.asarray(normed, np.float64), want, rtol=rtol, atol=4 * rtol)


@pytest.mark.parametrize(
    ("num_devices", "num_rows", "size"),
    quick_first(
        [
            (2, 1, 4096),
            (2, 8192, 2880),
            (2, 8192, 896),
            (2, 8192, 4096),
            (2, 8192, 5120),
            (2, 8192, 6144),
            (2, 8192, 8192),
            (2, 300, 16384),
            (8, 256, 16384),
        ]
    ),
)
def test_on_h200s_they_are_kernels_that_xla_takes_for_any_others(num_devices, num_rows, size):
    """In one command buffer, without spills, and with the peers' buffers in place. CTAs that wait for CTAs of peers are
    all resident at the same time.
    """
    mesh = h200_mesh((num_devices,), ("tensor",))
    peers = abstract_peer_buffers(mesh, "tensor", num_rows=max(64, num_rows), size=size, dtype=jnp.bfloat16)

    def shape(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    arguments = shape((num_rows, size)), shape((num_devices * num_rows, size), "tensor"), shape((size,)), peers
    program = compile_for_h200(layers(mesh, implementation="sm90", num_calls=6), *arguments)
    assert program.spill_bytes == 0
    assert program.thunks == {"kCommandBuffer": 1}
    for buffer in (peers.inbox, peers.arrived, peers.calls):
        assert program.copies_of((1, *buffer.shape[1:])) == []
    per_multiprocessor = 2 if num_devices > 2 or size > 8192 else 4 if size > 4096 else 6
    blocks = min(num_rows, 132 * per_multiprocessor)
    for kernel in program.kernels:
        registers = -(-kernel.num_registers // 8) * 8  # as they are given out
        assert blocks <= 132 * (65_536 // (128 * registers))


def test_what_it_takes():
    mesh = make_mesh(2)
    peers = abstract_peer_buffers(mesh, "tensor", num_rows=4, size=256, dtype=jnp.bfloat16)
    odd = abstract_peer_buffers(mesh, "tensor", num_rows=4, size=196, dtype=jnp.bfloat16)
    for shape, dtype, buffers, takes in [
        ((4, 256), jnp.bfloat16, peers, True),
        ((5, 256), jnp.bfloat16, peers, False),
        ((4, 128), jnp.bfloat16, peers, False),
        ((4, 256), jnp.float16, peers, False),
        ((4, 196), jnp.bfloat16, odd, False),
    ]:
        assert (why_not(jax.ShapeDtypeStruct(shape, dtype), buffers) is None) == takes

    call = functools.partial(all_reduce_add_rms_norm, axis_name="tensor", eps=EPS, implementation="sm90")
    x, weight = jnp.zeros((5, 256), jnp.bfloat16), jnp.zeros(256, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="room for 4 rows of 256 values in bfloat16, got 5 of 256"):
        call(x, x, weight, peers)
    with pytest.raises(NotImplementedError, match="in bfloat16, got 4 of 256 in float32"):
        call(x[:4], x[:4].astype(jnp.float32), weight, peers)
    with pytest.raises(NotImplementedError, match="got 196 in bfloat16"):
        call(x[:4, :196], x[:4, :196], weight[:196], odd)
    with pytest.raises(ValueError, match="devices along 'other', and peers along 'tensor'"):
        all_reduce_add_rms_norm(x, x, weight, peers, axis_name="other", eps=EPS)
    with pytest.raises(ValueError, match="devices along 'other', and peers along 'tensor'"):
        all_reduce(x, peers, axis_name="other")
    with pytest.raises(NotImplementedError, match="room for 4 rows of 256 values in bfloat16, got 5 of 256"):
        all_reduce(x, peers, axis_name="tensor", implementation="sm90")


@pytest.mark.parametrize(
    ("implementation", "size"),
    [
        pytest.param("xla", 896, marks=pytest.mark.slow),
        pytest.param("sm90", 896, marks=needs_two_gpus),
        pytest.param("sm90", 2880, marks=needs_two_gpus),
        pytest.param("sm90", 4096, marks=needs_two_gpus),
    ],
)
def test_whole_numbers(implementation, size):
    """Integers, whose sums are exact: in calls of one row up to all that fit, again and again."""
    is_kernel = implementation == "sm90"  # XLA's collectives have no buffers that many calls could confuse
    mesh, num_calls, most = make_mesh(2), 21 if is_kernel else 3, 8192 if is_kernel else 256
    peers = allocate_peer_buffers(abstract_peer_buffers(mesh, "tensor", num_rows=most, size=size, dtype=jnp.bfloat16))

    def calls(x, part, weight, peers):
        """Call one after the other, each with other parts; return how many values of each are wrong (of norms, very
        wrong).
        """
        device, wrong = jax.lax.axis_index("tensor"), []
        sum_up = functools.partial(all_reduce, axis_name="tensor", implementation=implementation)
        norm = functools.partial(all_reduce_add_rms_norm, axis_name="tensor", eps=EPS, implementation=implementation)
        whole = jax.lax.psum(part.astype(jnp.float32), "tensor")
        for call in range(num_calls):
            other = part + ((call * (device + 1)) % 5).astype(part.dtype)
            total, normed = norm(x, other, weight, peers)
            want = x.astype(jnp.float32) + whole + (call % 5 + 2 * call % 5)
            scale = 1 / jnp.sqrt((want**2).mean(axis=1, keepdims=True) + EPS)
            far = jnp.abs(normed.astype(jnp.float32) - want * scale) > 2**-7 * jnp.abs(want * scale)
            summed = sum_up(other + 0 * total, peers)
            wide, summed = (y.astype(jnp.float32) for y in (x, summed))
            wrong += [(total.astype(jnp.float32) != want).sum(), far.sum(), (summed != want - wide).sum()]
            x = x + 0 * summed.astype(x.dtype)
        return jnp.stack(wrong)[None]

    everywhere, by_device = PartitionSpec(), PartitionSpec("tensor")
    specs = everywhere, by_device, everywhere, peer_buffers_spec(mesh)
    run = jax.jit(jax.shard_map(calls, mesh=mesh, in_specs=specs, out_specs=by_device, check_vma=False))
    rng = np.random.default_rng(0)
    for num_rows in (1, 64, 3, most, 16, most - 1) * (10 if is_kernel else 1):
        x, parts = (rng.integers(-8, 9, (count * num_rows, size)) for count in (1, 2))
        arguments = (
            jax.device_put(jnp.asarray(array, jnp.bfloat16), NamedSharding(mesh, spec))
            for array, spec in zip((x, parts, np.ones(size)), specs, strict=False)
        )
        np.testing.assert_array_equal(run(*arguments, peers), 0)
