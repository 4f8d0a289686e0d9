"""Benchmarks of the operations between devices, on all GPUs of this machine: `all_gather` for logits of Llama 3's
vocabulary, `all_reduce_add_rms_norm` between the blocks of a Llama-3-8B layer.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.all_gather import all_gather, num_pieces
from pallas_kernels.all_reduce import all_reduce_add_rms_norm
from pallas_kernels.implementation import Implementation
from pallas_kernels.peers import PeerBuffers, abstract_peer_buffers, allocate_peer_buffers, peer_buffers_spec
from pallas_kernels.timing import Row, compare, on_gpu, ours

AXIS = "tensor"
GATHERS, SUMS = 8, 16
"""Operations per set of inputs."""
_BY_COLUMN, _BY_DEVICE, _EVERYWHERE = PartitionSpec(None, AXIS), PartitionSpec(AXIS), PartitionSpec()


ALONE = Row("several devices", "sm90", None, note="there is one")


def all_gather_rows() -> Iterator[Row]:
    """Yield a row for each number of rows and implementation, if there are several devices."""
    num_devices = jax.device_count()
    if num_devices == 1:
        yield ALONE
        return
    row_counts, size = ((1, 16, 64, 256), 128_256 // num_devices) if on_gpu() else ((1, 64), 512)
    mesh = jax.make_mesh((num_devices,), (AXIS,), (AxisType.Auto,))
    room: dict[str, Any] = {"num_rows": max(row_counts), "size": size, "dtype": jnp.float32}
    room["num_pieces"] = num_pieces(size, jnp.float32)
    peers = allocate_peer_buffers(abstract_peer_buffers(mesh, AXIS, **room))
    calls = ours(_gathers, mesh=mesh)
    for num_rows in row_counts:
        shape = num_rows, num_devices * size
        carry = _random(0, shape, jnp.float32, mesh, _BY_COLUMN)
        case = f"{num_rows} x {num_devices * size}, {num_devices} devices"
        yield from compare(case, calls, [(peers,)] * 2, carry=carry, operations=GATHERS)


def _gathers(part: jax.Array, peers: PeerBuffers, *, mesh: Mesh, implementation: Implementation) -> jax.Array:
    """Gather GATHERS times in sequence, columns that were a peer's in the previous one."""

    def run(part: jax.Array, peers: PeerBuffers) -> jax.Array:
        for _ in range(GATHERS):
            whole = all_gather(part, peers, axis_name=AXIS, implementation=implementation)
            part = jnp.roll(whole, part.shape[1], axis=1)[:, : part.shape[1]]
        return part

    specs = _BY_COLUMN, peer_buffers_spec(mesh)
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=_BY_COLUMN, check_vma=False)(part, peers)


def all_reduce_rows() -> Iterator[Row]:
    """Yield a row for each number of tokens and implementation, if there are several devices."""
    num_devices = jax.device_count()
    if num_devices == 1:
        yield ALONE
        return
    token_counts, size = ((1, 16, 64, 256, 1024, 8192), 4096) if on_gpu() else ((1, 64), 512)
    mesh, dtype = jax.make_mesh((num_devices,), (AXIS,), (AxisType.Auto,)), jnp.bfloat16
    room: dict[str, Any] = {"num_rows": max(token_counts), "size": size, "dtype": dtype}
    peers = allocate_peer_buffers(abstract_peer_buffers(mesh, AXIS, **room))
    weight = _random(0, (size,), dtype, mesh, _EVERYWHERE)
    calls = ours(_layers, mesh=mesh)
    for num_tokens in token_counts:
        parts = [_random(seed, (num_devices * num_tokens, size), dtype, mesh, _BY_DEVICE) for seed in range(2)]
        carry = _random(2, (num_tokens, size), dtype, mesh, _EVERYWHERE)
        inputs, case = [(part, weight, peers) for part in parts], f"{num_tokens} x {size}, {num_devices} devices"
        yield from compare(case, calls, inputs, carry=carry, operations=SUMS)


def _layers(
    x: jax.Array, part: jax.Array, weight: jax.Array, peers: PeerBuffers, *, mesh: Mesh, implementation: Implementation
) -> jax.Array:
    """Add up SUMS times in sequence: the norm of each is a device's partial sum of the next."""

    def run(x: jax.Array, part: jax.Array, weight: jax.Array, peers: PeerBuffers) -> jax.Array:
        for _ in range(SUMS):
            x, part = all_reduce_add_rms_norm(
                x, part, weight, peers, axis_name=AXIS, eps=1e-5, implementation=implementation
            )
        return x

    specs = _EVERYWHERE, _BY_DEVICE, _EVERYWHERE, peer_buffers_spec(mesh)
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=_EVERYWHERE, check_vma=False)(x, part, weight, peers)


def _random(seed: int, shape: tuple[int, ...], dtype: Any, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    return jax.device_put(jax.random.normal(jax.random.key(seed), shape, dtype), NamedSharding(mesh, spec))
