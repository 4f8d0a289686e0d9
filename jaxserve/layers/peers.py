"""Where kernels put what the devices of a step send each other: shares of sums, and logits of parts of the vocabulary.

XLA's collectives meet on the host in each step. With these buffers a step of a dense model or of experts has none of
them, but for log probabilities of prompts and what has no room here.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxserve.layers.batch import Kernels
from jaxserve.layers.sharding import mesh_axis
from pallas_kernels import all_gather, all_reduce
from pallas_kernels.peers import PeerBuffers, abstract_peer_buffers, allocate_peer_buffers, peer_buffers_spec

MAX_ROWS_OF_SUMS = 256
"""Of steps in which more than two devices add up shares through each other's memory. A device sends all of its share to
each, of many rows more than NCCL would.
"""

MAX_ROWS_OF_SUMS_OF_TWO = 16_384
"""Of two devices, which send as much as with NCCL: bounds what the buffers take."""

MAX_ROWS_OF_LOGITS = 512
"""Of steps whose logits are put together so: bounds what the buffers take."""


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
    """Shapes and shardings for steps of so many tokens and rows; None where no devices share a sum."""
    axis = mesh_axis("ffn", mesh)
    if axis is None:
        return None
    num_devices = mesh.shape[axis]
    limit = MAX_ROWS_OF_SUMS_OF_TWO if num_devices == 2 else MAX_ROWS_OF_SUMS
    sums = abstract_peer_buffers(mesh, axis, num_rows=min(limit, max_num_tokens), size=hidden_size, dtype=dtype)
    share = vocab_size // num_devices
    logits = abstract_peer_buffers(
        mesh,
        axis,
        num_rows=min(MAX_ROWS_OF_LOGITS, max_num_rows, max_num_tokens),
        size=share,
        dtype=jnp.float32,
        num_pieces=all_gather.num_pieces(share, jnp.float32),
    )
    takes_sums = all_reduce.why_not(jax.ShapeDtypeStruct((1, hidden_size), dtype), sums) is None
    takes_logits = all_gather.why_not(jax.ShapeDtypeStruct((1, share), jnp.float32), logits) is None
    return Peers(sums if takes_sums else None, logits if takes_logits and vocab_size % num_devices == 0 else None)


def summed(x: Float[Array, "T E"], peers: PeerBuffers | None, *, kernels: Kernels) -> Float[Array, "T E"]:
    """The sum of which devices have shares, if they do, on each of them: through `peers` where there is room for it."""
    sharding = jax.typeof(x).sharding
    if not sharding.spec.unreduced:
        return x
    if peers is None or all_reduce.why_not(x, peers) is not None:
        return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec.partitions)))
    return jax.shard_map(
        functools.partial(all_reduce.all_reduce, axis_name=peers.axis_name, implementation=kernels),
        in_specs=(PartitionSpec(unreduced=sharding.spec.unreduced), peer_buffers_spec(sharding.mesh)),
        out_specs=PartitionSpec(),
        check_vma=False,  # a kernel call does not say over which axes its outputs vary
    )(x, peers)


def allocate_peers(shapes: Peers) -> Peers:
    """What `abstract_peers` has declared, on GPUs of one process that reach each other's memory."""
    return Peers(*(None if buffers is None else allocate_peer_buffers(buffers) for buffers in shapes))
