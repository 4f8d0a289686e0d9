"""The one place where an activation meets a weight, whatever the weight's format and however it is sharded.

A weight keeps a checkpoint's order, [*out, *in]: nothing is transposed while loading, and both operands of the matmul
run along the contracted axis, which is what fp8 tensor cores ask for. With XLA's bf16 matmuls on an H200 (8B shape,
whole step without attention) [*in, *out] is 2 to 4% faster up to 64 tokens, and no faster from 256 on.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxserve.layers.batch import Kernels
from jaxserve.layers.peers import summed
from pallas_kernels import small_matmul
from pallas_kernels.peers import PeerBuffers


def linear(
    x: Float[Array, " T *inputs"],
    weight: Float[Array, "..."],
    bias: Float[Array, "*outputs"] | None = None,
    *,
    output_dtype: jnp.dtype | None = None,
    leaves_shares: bool = False,
) -> Float[Array, " T *outputs"]:
    """Contract all axes of `x` but the first with the last axes of `weight`; the result is in x's dtype by default.

    Contracting a sharded axis ends in an all-reduce and a replicated result, otherwise the output is sharded as the
    weight is. With `leaves_shares` there is no all-reduce: the result is "unreduced" over the axis, each device has its
    share of the sum. float32 operands are multiplied in full float32, also where the hardware would rather round them.
    Raises ValueError for shares with a bias.
    """
    if leaves_shares and bias is not None:
        raise ValueError("a bias would be in each share of the sum")
    num_outputs = weight.ndim - (x.ndim - 1)
    outputs = weight.shape[:num_outputs]
    out_sharding = _output_sharding(weight, num_outputs, leaves_shares=leaves_shares)
    if not is_split(weight):
        # As a plain matrix: in every step XLA on a CPU would transpose a weight of more axes. For 100 M parameters in
        # float32 a token costs 14.7 ms this way, 101 the other (jaxserve bench latency, 2 cores).
        x = x.reshape(x.shape[0], -1)
        weight = weight.reshape(-1, x.shape[1])
        out_sharding = _output_sharding(weight, 1)
    contracted = (tuple(range(1, x.ndim)), tuple(range(weight.ndim - (x.ndim - 1), weight.ndim)))
    y = jax.lax.dot_general(
        x,
        weight,
        (contracted, ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=output_dtype or x.dtype,
        out_sharding=out_sharding,
    )
    y = y if y.shape[1:] == outputs else y.reshape(x.shape[0], *outputs)
    return y if bias is None else y + bias[None]


def linear_with_sum(
    x: Float[Array, " T *inputs"],
    weight: Float[Array, "..."],
    bias: Float[Array, " E"] | None,
    *,
    kernels: Kernels,
    peers: PeerBuffers | None,
    leaves_shares: bool,
) -> Float[Array, "T E"]:
    """`linear` at the end of a block: devices that have shares of the result add them up through `peers`, if there are
    any. With `leaves_shares` they do not.
    """
    if leaves_shares or peers is None:
        return linear(x, weight, bias, leaves_shares=leaves_shares)
    y = summed(linear(x, weight, leaves_shares=True), peers, kernels=kernels)
    return y if bias is None else y + bias[None]


def linear_of_few_rows(
    x: Float[Array, " T inputs"],
    weight: Float[Array, "..."],
    *,
    kernels: Kernels,
    output_dtype: jnp.dtype | None = None,
) -> Float[Array, " T *outputs"]:
    """`linear` of vectors by the kernel for few rows, where that takes them.

    XLA's are up to 2% faster, but for each shape it tries out dozens: most of what the start of an 8B model compiled.
    """
    share = share_of(weight)
    matrix = jax.ShapeDtypeStruct((math.prod(share.shape[:-1]), share.shape[-1]), share.dtype)
    if kernels != "sm90" or share.shape[-1] != weight.shape[-1] or not small_matmul.supports(x, matrix):
        return linear(x, weight, output_dtype=output_dtype)

    def multiply(x: Array, weight: Array) -> Array:
        matrix = weight.reshape(-1, weight.shape[-1])
        y = small_matmul.matmul(x, matrix, output_dtype=output_dtype, implementation=kernels)
        return y.reshape(len(x), *weight.shape[:-1])

    sharding = jax.typeof(weight).sharding
    if not sharding.mesh.empty:
        multiply = jax.shard_map(
            multiply,
            in_specs=(PartitionSpec(), sharding.spec),
            out_specs=PartitionSpec(None, *sharding.spec[:-1]),
            check_vma=False,  # a kernel call does not say over which axes its outputs vary
        )
    return multiply(x, weight)


def _output_sharding(weight: Array, num_outputs: int, *, leaves_shares: bool = False) -> NamedSharding | None:
    """Tokens are replicated, outputs lie as in the weight; None without a mesh."""
    sharding = jax.typeof(weight).sharding
    if sharding.mesh.empty:
        return None
    spec = sharding.spec
    shared = frozenset(axis for axis in spec[num_outputs:] if axis is not None) if leaves_shares else frozenset()
    return NamedSharding(sharding.mesh, PartitionSpec(None, *spec[:num_outputs], unreduced=shared))


def is_split(weight: Array) -> bool:
    """Whether devices share a weight."""
    return any(axis is not None for axis in jax.typeof(weight).sharding.spec)


def share_of(x: Array) -> jax.ShapeDtypeStruct:
    """The shape of what each device has of an array."""
    sharding = jax.typeof(x).sharding
    return jax.ShapeDtypeStruct(x.shape if sharding.mesh.empty else sharding.shard_shape(x.shape), x.dtype)
