"""The public operations: reduce partial sums over devices, alone and as they occur between two blocks of a layer."""

from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.all_reduce.sm90 import all_reduce_add_rms_norm_sm90, all_reduce_sm90
from pallas_kernels.implementation import Implementation, check_implementation
from pallas_kernels.peers import PeerBuffers


def all_reduce(
    part: Float[Array, "T E"], peers: PeerBuffers | None, *, axis_name: str, implementation: Implementation = "xla"
) -> Float[Array, "T E"]:
    """Sum the partial sums of the devices along a mesh axis, within `jax.shard_map`; all get the same result.

    Implementations and errors are those of `all_reduce_add_rms_norm`.
    """
    _check(peers, axis_name, implementation)
    if implementation == "sm90" and peers is not None:
        return all_reduce_sm90(part, peers)
    return lax.psum(part, axis_name)


def all_reduce_add_rms_norm(
    x: Float[Array, "T E"],
    part: Float[Array, "T E"],
    weight: Float[Array, " E"],
    peers: PeerBuffers | None,
    *,
    axis_name: str,
    eps: float,
    implementation: Implementation = "xla",
) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
    """Apply `add_rms_norm` to x and the sum of the partial sums `part` along a mesh axis, within `jax.shard_map`.

    x is the same on all devices, and so are the results, bit by bit. "xla" sums by `jax.lax.psum`, and so does "sm90"
    without `peers`. With peers, for the GPUs of one process, it sends the partial sums to the others and adds them in
    float32 in device order. The devices must call it equally often and with as many rows, one call after another. The
    buffers must be arguments of the program: constants would be copies.

    Raises ValueError for an unknown implementation and peers along another axis; NotImplementedError for dtypes and
    sizes that "sm90" does not support.
    """
    _check(peers, axis_name, implementation)
    if implementation == "sm90" and peers is not None:
        return all_reduce_add_rms_norm_sm90(x, part, weight, peers, eps=eps)
    return add_rms_norm(x, lax.psum(part, axis_name), weight, eps=eps, implementation=implementation)


def _check(peers: PeerBuffers | None, axis_name: str, implementation: str) -> None:
    check_implementation(implementation)
    if peers is not None:
        peers.check_axis(axis_name)
