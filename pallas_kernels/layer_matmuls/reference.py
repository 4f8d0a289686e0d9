"""The definition in float64 NumPy: what implementations are tested with."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from pallas_kernels.small_matmul import matmul_reference, rms_norm_reference


def layer_matmuls_reference(
    heads: Float[np.ndarray, "M A"],
    residual: Float[np.ndarray, "M E"],
    *,
    o: Float[np.ndarray, "E A"],
    gate_up: Float[np.ndarray, "2 F E"],
    down: Float[np.ndarray, "E F"],
    qkv: Float[np.ndarray, "N E"] | None,
    gains: tuple[Float[np.ndarray, " E"], Float[np.ndarray, " E"]],
    activation: Callable[[np.ndarray], np.ndarray],
    eps: float,
) -> tuple[Float[np.ndarray, "M E"], Float[np.ndarray, "M N"]]:
    """Compute `layer_matmuls`; after the last layer, which has no qkv, the second result is the norm itself."""
    x = matmul_reference(heads, o, residual=residual)
    inner = matmul_reference(rms_norm_reference(x, gains[0], eps), gate_up, activation=activation)
    x = matmul_reference(inner, down, residual=x)
    normed = rms_norm_reference(x, gains[1], eps)
    return x, normed if qkv is None else matmul_reference(normed, qkv)
