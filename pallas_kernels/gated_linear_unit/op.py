"""The public operation: gate and up of an MLP as one matmul for many rows, with the activation in its epilogue."""

from collections.abc import Callable

from jaxtyping import Array, Float

from pallas_kernels.gated_linear_unit.sm90 import gated_linear_unit_sm90
from pallas_kernels.implementation import Implementation, check_implementation
from pallas_kernels.small_matmul import matmul


def gated_linear_unit(
    x: Float[Array, "M K"],
    weight: Float[Array, "2 N K"],
    *,
    activation: Callable[[Array], Array],
    implementation: Implementation = "xla",
) -> Float[Array, "M N"]:
    """Compute activation(x @ gate^T) * (x @ up^T) with sums in float32, the result in x's dtype (Shazeer 2020,
    arXiv:2002.05202).

    The weight is gate and up, each as in checkpoints. "sm90" calls the activation in the kernel, with float32, and jits
    it as a static argument: pass the same function for each layer.

    "sm90" is a Mosaic kernel for Hopper GPUs; "xla" runs anywhere. Raises ValueError for an unknown implementation or
    shapes that do not match, NotImplementedError for what "sm90" does not support: fewer than 128 rows, dtypes other
    than bfloat16 and float16, K that is not a multiple of 64, N that is not a multiple of 8 or is less than 128.
    """
    check_implementation(implementation)
    if weight.shape != (2, weight.shape[1], x.shape[1]):
        raise ValueError(f"x of shape {x.shape} does not fit a weight of shape {weight.shape}, which must be [2, N, K]")
    if implementation == "sm90":
        return gated_linear_unit_sm90(x, weight, activation=activation)
    return matmul(x, weight, activation=activation)
