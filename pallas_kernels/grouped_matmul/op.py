"""The public operation: the matmuls of a layer's experts, over tokens sorted by expert."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.sm90 import grouped_matmul_sm90
from pallas_kernels.grouped_matmul.tiles import Plan
from pallas_kernels.grouped_matmul.xla import grouped_matmul_xla
from pallas_kernels.implementation import Implementation, check_implementation


def grouped_matmul(
    x: Float[Array, "M K"],
    weight: Float[Array, "..."],
    group_sizes: Int[Array, " X"],
    *,
    bias: Float[Array, "..."] | None = None,
    activation: Callable[[Array, Array], Array] | None = None,
    tiles: Plan | None = None,
    implementation: Implementation = "xla",
) -> Float[Array, "M N"]:
    """Multiply each row by the transposed weight of its group (Gale et al. 2022, arXiv:2211.15841).

    The first group_sizes[0] rows are those of group 0, and so on. Rows after all groups are padding: nothing is
    computed for them, whatever they contain, and their results are undefined (possibly NaN). Groups may be empty, and
    then cost nothing. Sums are in float32 or wider, the result in x's dtype.

    The weight is [X, N, K]. With an `activation` it is [X, 2, N, K], gate and up, and the result activation(gate, up);
    "sm90" calls it once per tile in the kernel, with float32, and jits it as a static argument: pass the same function
    for each layer. `bias`, in the shape of the weight's outputs, is added before that. `tiles` is the result of `plan`
    for these sizes and tiles of `tile_rows(M, X)`, if it has been computed already; "xla" ignores it.

    "sm90" is a Mosaic kernel for Hopper GPUs; "xla" runs anywhere, on a GPU at the cost of a copy of all weights.
    Weights are local: with a sharded axis, call it inside `jax.shard_map`. Sizes that exceed M in total, or are
    negative, give undefined results. Raises ValueError for an unknown implementation, shapes that do not match, or
    dtypes that differ; NotImplementedError for what "sm90" does not support: dtypes other than bfloat16 and float16, K
    that is not a multiple of 64, N that is not a multiple of 8 or is less than 64.
    """
    check_implementation(implementation)
    check_groups(x, weight.shape, group_sizes, bias, is_gated=activation is not None)
    if weight.dtype != x.dtype:
        raise ValueError(f"x and weight must have one dtype, got {jnp.dtype(x.dtype)} and {jnp.dtype(weight.dtype)}")
    if implementation == "xla":
        return grouped_matmul_xla(x, weight, group_sizes, bias=bias, activation=activation)
    return grouped_matmul_sm90(x, weight, group_sizes, bias=bias, activation=activation, tiles=tiles)


def check_groups(
    x: Float[Array, "M K"],
    weight: tuple[int, ...],
    group_sizes: Int[Array, " X"],
    bias: Float[Array, "..."] | None,
    *,
    is_gated: bool,
) -> None:
    """Raise ValueError for shapes that do not fit together, that of the weight first."""
    if len(weight) != 3 + is_gated or (is_gated and weight[1] != 2):
        wanted = "[X, 2, N, K], gate and up" if is_gated else "[X, N, K]"
        raise ValueError(f"weight must be {wanted}, got shape {weight}")
    if weight[-1] != x.shape[1]:
        raise ValueError(f"x of shape {x.shape} does not fit a weight of shape {weight}")
    if group_sizes.shape != weight[:1]:
        raise ValueError(f"group_sizes must have {weight[0]} entries, one a group, got {group_sizes.shape}")
    if bias is not None and bias.shape != weight[:-1]:
        raise ValueError(f"bias must have shape {weight[:-1]}, got {bias.shape}")
