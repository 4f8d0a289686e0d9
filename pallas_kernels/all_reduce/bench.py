"""Benchmark of `all_reduce_add_rms_norm`: between the blocks of a Llama-3-8B layer, on all GPUs of this machine."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.all_reduce.op import Implementation, all_reduce_add_rms_norm
from pallas_kernels.peers import abstract_peer_buffers, allocate_peer_buffers, peer_buffers_spec
from pallas_kernels.timing import Row, measure, on_gpu

AXIS = "tensor"
CALLS = 16
"""Calls per set of inputs."""


def all_reduce_rows() -> Iterator[Row]:
    """Yield a row for each number of tokens and implementation, if there are several devices."""
    num_devices = jax.device_count()
    if num_devices == 1:
        yield Row("several devices", "sm90", None, note="there is one")
        return
    mesh = jax.make_mesh((num_devices,), (AXIS,), (AxisType.Auto,))
    size, everywhere, by_device = 4096 if on_gpu() else 512, PartitionSpec(), PartitionSpec(AXIS)
    token_counts = (1, 16, 64, 256, 1024, 8192) if on_gpu() else (1, 64)
    peers = allocate_peer_buffers(
        abstract_peer_buffers(mesh, AXIS, num_rows=max(token_counts), size=size, dtype=jnp.bfloat16)
    )
    for num_tokens in token_counts:

        def put(num_rows: int, spec: PartitionSpec, seed: int) -> jax.Array:
            x = jax.random.normal(jax.random.key(seed), (num_rows, size), jnp.bfloat16)
            return jax.device_put(x, NamedSharding(mesh, spec))

        weight = put(1, everywhere, 0)[0]
        inputs = [(put(num_devices * num_tokens, by_device, seed), weight, peers) for seed in range(2)]
        for implementation in ("sm90", "xla") if on_gpu() else ("xla",):
            x = put(num_tokens, everywhere, 2)
            took = measure(_layers(mesh, implementation), inputs, carry=x) / CALLS
            yield Row(f"{num_tokens} x {size}, {num_devices} devices", implementation, took)


def _layers(mesh: Mesh, implementation: Implementation) -> Callable[..., jax.Array]:
    """Return a function of CALLS sums in sequence: the norm of each is a device's partial sum of the next."""
    everywhere, by_device = PartitionSpec(), PartitionSpec(AXIS)

    def run(x, part, weight, peers):
        for _ in range(CALLS):
            x, part = all_reduce_add_rms_norm(
                x, part, weight, peers, axis_name=AXIS, eps=1e-5, implementation=implementation
            )
        return x

    specs = everywhere, by_device, everywhere, peer_buffers_spec(mesh)
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=False)
