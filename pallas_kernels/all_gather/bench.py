"""Benchmark of `all_gather`: logits of Llama 3's vocabulary, on all GPUs of this machine."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.all_gather.op import Implementation, all_gather
from pallas_kernels.all_gather.sm90 import num_pieces
from pallas_kernels.peers import abstract_peer_buffers, allocate_peer_buffers, peer_buffers_spec
from pallas_kernels.timing import Row, measure, on_gpu

AXIS = "tensor"
CALLS = 8
"""Calls per set of inputs."""


def all_gather_rows() -> Iterator[Row]:
    """Yield a row for each number of tokens and implementation, if there are several devices."""
    num_devices = jax.device_count()
    if num_devices == 1:
        yield Row("several devices", "sm90", None, note="there is one")
        return
    mesh = jax.make_mesh((num_devices,), (AXIS,), (AxisType.Auto,))
    by_column, size = PartitionSpec(None, AXIS), 128_256 // num_devices if on_gpu() else 512
    row_counts = (1, 16, 64, 256) if on_gpu() else (1, 64)
    pieces = num_pieces(size, jnp.float32)
    peers = allocate_peer_buffers(
        abstract_peer_buffers(mesh, AXIS, num_rows=max(row_counts), size=size, dtype=jnp.float32, num_pieces=pieces)
    )
    for num_rows in row_counts:

        def put(seed: int, num_rows: int = num_rows) -> jax.Array:
            x = jax.random.normal(jax.random.key(seed), (num_rows, num_devices * size), jnp.float32)
            return jax.device_put(x, NamedSharding(mesh, by_column))

        for implementation in ("sm90", "xla") if on_gpu() else ("xla",):
            took = measure(_gathers(mesh, implementation), [(peers,)] * 2, carry=put(0)) / CALLS
            yield Row(f"{num_rows} x {num_devices * size}, {num_devices} devices", implementation, took)


def _gathers(mesh: Mesh, implementation: Implementation) -> Callable[..., jax.Array]:
    """Return a function of CALLS gathers in sequence, each of columns that were a peer's in the previous one."""
    by_column = PartitionSpec(None, AXIS)

    def run(part, peers):
        for _ in range(CALLS):
            whole = all_gather(part, peers, axis_name=AXIS, implementation=implementation)
            part = jnp.roll(whole, part.shape[1], axis=1)[:, : part.shape[1]]
        return part

    specs = by_column, peer_buffers_spec(mesh)
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=by_column, check_vma=False)
