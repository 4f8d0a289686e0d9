"""The public operation: logits, say, of which each device has those of a part of the vocabulary."""

from jax import lax
from jaxtyping import Array, Shaped

from pallas_kernels.all_gather.sm90 import all_gather_sm90
from pallas_kernels.implementation import Implementation, check_implementation
from pallas_kernels.peers import PeerBuffers


def all_gather(
    part: Shaped[Array, "T C"], peers: PeerBuffers | None, *, axis_name: str, implementation: Implementation = "xla"
) -> Shaped[Array, "T columns"]:
    """Gather the columns of all devices along a mesh axis, in device order, within `jax.shard_map`.

    "xla" is `jax.lax.all_gather`, and so is "sm90" without `peers`. With peers, for the GPUs of one process, each sends
    its columns to the others: see `all_reduce_add_rms_norm` for what devices must comply with. The buffers have rows of
    C values in `num_pieces` pieces.

    Raises ValueError for an unknown implementation and peers along another axis; NotImplementedError for what "sm90"
    does not support.
    """
    check_implementation(implementation)
    if peers is not None:
        peers.check_axis(axis_name)
    if implementation == "sm90" and peers is not None:
        return all_gather_sm90(part, peers)
    return lax.all_gather(part, axis_name, axis=1, tiled=True)
