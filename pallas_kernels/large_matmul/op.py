"""The public operation: a layer's matmul for many rows, with the gated activation of an MLP in its epilogue."""

from collections.abc import Callable
from typing import Literal, get_args

from jaxtyping import Array, Float

from pallas_kernels.large_matmul.sm90 import check_supported, large_matmul_sm90
from pallas_kernels.small_matmul.xla import matmul_xla

Implementation = Literal["xla", "sm90"]


def supports(x: Float[Array, "M K"], weight: Float[Array, "..."]) -> bool:
    """Whether "sm90" multiplies such rows by such a weight."""
    try:
        check_supported(x, weight)
    except NotImplementedError:
        return False
    return True


def large_matmul(
    x: Float[Array, "M K"],
    weight: Float[Array, "..."],
    *,
    activation: Callable[[Array], Array] | None = None,
    implementation: Implementation = "xla",
) -> Float[Array, "M N"]:
    """Compute x @ weight^T with sums in float32, the result in x's dtype.

    The weight is [N, K], as checkpoints have it. With an `activation` it is [2, N, K], gate and up, and the result
    activation(gate) * up; "sm90" calls that in the kernel, with float32, and jits it as a static argument: give
    the same function for each layer.

    "sm90" is a Mosaic kernel for Hopper GPUs; "xla" runs anywhere. Raises ValueError for an unknown implementation or
    shapes that do not fit together, NotImplementedError for what "sm90" cannot do: fewer than 64 rows, dtypes but
    bfloat16 and float16, K that is no multiple of 64, N that is none of 8 or less than 64.
    """
    if implementation not in get_args(Implementation):
        known = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"unknown implementation {implementation!r}, there is {known}")
    outputs = weight.shape[:-1]
    is_gated = activation is not None
    if len(outputs) != 1 + is_gated or (is_gated and outputs[0] != 2):
        wanted = "[2, N, K], gate and up" if is_gated else "[N, K]"
        raise ValueError(f"weight must be {wanted}, got shape {weight.shape}")
    if x.shape[1] != weight.shape[-1]:
        raise ValueError(f"x of shape {x.shape} does not fit a weight of shape {weight.shape}")
    if implementation == "sm90":
        return large_matmul_sm90(x, weight, activation=activation)
    return matmul_xla(
        x, weight, squares=None, eps=0.0, bias=None, activation=activation, residual=None, output_dtype=None
    )
