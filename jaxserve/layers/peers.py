"""Memory through which the devices of a step send each other partial sums, and logits of parts of the vocabulary.

XLA's collectives synchronise on the host in each step. With these buffers a step of a dense or a mixture-of-experts
model has no such collectives, except for log probabilities of prompts and for steps that exceed the buffers.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxserve.layers.context import Kernel, StepContext, result
from jaxserve.layers.parts import sum_part
from jaxserve.layers.sharding import DATA, mesh_axes, shard_map
from pallas_kernels import all_gather, all_reduce
from pallas_kernels.peers import PeerBuffers, abstract_peer_buffers, allocate_peer_buffers, peer_buffers_spec

MAX_ROWS_OF_SUMS = 256
"""Most rows of a step in which more than two devices add up partial sums through each other's memory. A device sends
all of its partial sum to each other device; with more rows that is more than NCCL would send.
"""

MAX_ROWS_OF_SUMS_OF_TWO = 16_384
"""Most rows with two devices, which send as much as NCCL does; it bounds the size of the buffers."""

MAX_ROWS_OF_LOGITS = 512
"""Most rows of a step whose logits are gathered through peers' memory; it bounds the size of the buffers."""


class Peers(NamedTuple):
    """The buffers of a step, or their shapes."""

    sums: PeerBuffers | None
    logits: PeerBuffers | None
    """None of either where kernels do not take such rows, or each device has the whole vocabulary."""


def abstract_peers(
    mesh: Mesh | AbstractMesh,
    *,
    hidden_size: int,
    vocab_size: int,
    dtype: jnp.dtype,
    max_num_tokens: int,
    max_num_rows: int,
) -> Peers | None:
    """Return shapes and shardings for steps of up to `max_num_tokens` tokens and `max_num_rows` rows; None if no
    devices have partial sums, or devices along two axes have, or tokens are split.
    """
    axis = mesh_axes("ffn", mesh)
    if not isinstance(axis, str) or mesh.shape.get(DATA, 1) > 1:
        return None
    num_devices = mesh.shape[axis]
    limit = MAX_ROWS_OF_SUMS_OF_TWO if num_devices == 2 else MAX_ROWS_OF_SUMS
    sums = abstract_peer_buffers(mesh, axis, num_rows=min(limit, max_num_tokens), size=hidden_size, dtype=dtype)
    shard_size = vocab_size // num_devices
    logits = abstract_peer_buffers(
        mesh,
        axis,
        num_rows=min(MAX_ROWS_OF_LOGITS, max_num_rows, max_num_tokens),
        size=shard_size,
        dtype=jnp.float32,
        num_pieces=all_gather.num_pieces(shard_size, jnp.float32),
    )
    takes_sums = all_reduce.why_not(jax.ShapeDtypeStruct((1, hidden_size), dtype), sums) is None
    takes_logits = all_gather.why_not(jax.ShapeDtypeStruct((1, shard_size), jnp.float32), logits) is None
    return Peers(sums if takes_sums else None, logits if takes_logits and vocab_size % num_devices == 0 else None)


def summed(x: Float[Array, "T E"], context: StepContext) -> Float[Array, "T E"]:
    """Return the sum of the devices' partial sums, if they have any, on each of them: through peers if it fits."""
    sharding, peers = jax.typeof(x).sharding, context.peers
    if not sharding.spec.unreduced:
        return x
    whole = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec.partitions))
    if peers is None or sum_part(x, peers).kernel == Kernel.XLA:
        return jax.sharding.reshard(x, whole)
    run = functools.partial(all_reduce.all_reduce, axis_name=peers.axis_name, implementation=context.kernels)
    in_specs = PartitionSpec(unreduced=sharding.spec.unreduced), peer_buffers_spec(sharding.mesh)
    return context.call(shard_map(run, in_specs, PartitionSpec()), result(x.shape, x.dtype, whole), x, peers)


def allocate_peers(shapes: Peers) -> Peers:
    """Allocate what `abstract_peers` has declared, on GPUs of one process that reach each other's memory."""
    return Peers(*(None if buffers is None else allocate_peer_buffers(buffers) for buffers in shapes))
