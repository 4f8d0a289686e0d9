"""The definition in float64 NumPy: what implementations are tested with."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float


def matmul_reference(
    x: Float[np.ndarray, "M K"],
    weight: Float[np.ndarray, "*outputs K"],
    *,
    activation: Callable[[np.ndarray], np.ndarray] | None = None,
    residual: Float[np.ndarray, "M N"] | None = None,
) -> Float[np.ndarray, "M N"]:
    """See `matmul`."""
    y = np.einsum("mk,...k->m...", x.astype(np.float64), weight.astype(np.float64))
    if activation is not None:
        y = activation(y[:, 0]) * y[:, 1]
    return y if residual is None else y + residual


def rms_norm_reference(
    x: Float[np.ndarray, "M N"], gain: Float[np.ndarray, " N"], eps: float
) -> Float[np.ndarray, "M N"]:
    """Rows scaled to a root mean square of 1, times `gain`."""
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps) * gain
