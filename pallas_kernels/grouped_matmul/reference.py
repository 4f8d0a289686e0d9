"""The definition in float64 NumPy: what implementations are tested with."""

import numpy as np
from jaxtyping import Float, Int


def grouped_matmul_reference(
    x: Float[np.ndarray, "M K"], weight: Float[np.ndarray, "X N K"], group_sizes: Int[np.ndarray, " X"]
) -> Float[np.ndarray, "M N"]:
    """See `grouped_matmul`."""
    y = np.zeros((x.shape[0], weight.shape[1]))
    start = 0
    for matrix, size in zip(weight, group_sizes, strict=True):
        y[start : start + size] = x[start : start + size].astype(np.float64) @ matrix.astype(np.float64).T
        start += size
    return y
