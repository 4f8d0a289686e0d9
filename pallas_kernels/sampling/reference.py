"""The definition of sampling, by sorting, in float64 NumPy: what implementations are tested with."""

import numpy as np
from jaxtyping import Float

BLOCK = 512


def kept_weights(
    logits: Float[np.ndarray, " V"], *, temperature: float, top_k: int, top_p: float, min_p: float
) -> Float[np.ndarray, " V"]:
    """Return the weights of one row that the filters keep, the largest being 1; see `sample`."""
    distance = (logits.max() - logits).astype(np.float64)  # exact in float32 too, for what matters
    weights = np.exp(-distance / temperature)
    if top_k > 0:
        limit = np.sort(distance)[min(top_k, len(distance)) - 1]
        weights = np.where(distance <= limit, weights, 0.0)
    if top_p < 1:
        descending = np.sort(weights)[::-1]
        running = np.cumsum(descending)
        last = np.searchsorted(running, top_p * running[-1])
        weights = np.where(weights >= descending[min(last, len(descending) - 1)], weights, 0.0)
    return np.where(weights >= min_p, weights, 0.0)


def draw(weights: Float[np.ndarray, " V"], uniform: Float[np.ndarray, " 2"]) -> int:
    """Return the token that two uniform numbers choose; see `sample`."""
    blocks = np.pad(weights, (0, -len(weights) % BLOCK)).reshape(-1, BLOCK)
    block = _invert(blocks.sum(axis=1), float(uniform[0]))
    return block * BLOCK + _invert(blocks[block], float(uniform[1]))


def _invert(weights: Float[np.ndarray, " n"], uniform: float) -> int:
    running = np.cumsum(weights)
    [candidates] = np.nonzero((weights > 0) & (running > uniform * running[-1]))
    return int(candidates[0])
