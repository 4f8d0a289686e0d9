"""The definition of attention over pages, dense, one row at a time, in float64 NumPy: what implementations are tested
with.
"""

import numpy as np
from jaxtyping import Float, Int


def attend_reference(
    q: Float[np.ndarray, "Q H D"],
    k_pages: Float[np.ndarray, "P K S D"],
    v_pages: Float[np.ndarray, "P K S D"],
    *,
    block_table: Int[np.ndarray, " N"],
    seq_len: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Float[np.ndarray, " H"] | None,
    alibi_slopes: Float[np.ndarray, " H"] | None,
) -> tuple[Float[np.ndarray, "Q H D"], Float[np.ndarray, "Q H"]]:
    """Attend with the last Q tokens of a context of `seq_len`; return the result and the log of the softmax's
    denominator.
    """
    num_queries, num_heads, _ = q.shape
    keys, values = (_context(pages, block_table, seq_len) for pages in (k_pages, v_pages))
    sharing = num_heads // keys.shape[1]
    keys, values = np.repeat(keys, sharing, axis=1), np.repeat(values, sharing, axis=1)

    scores = np.einsum("qhd,chd->hqc", q.astype(np.float64), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    position = np.arange(seq_len - num_queries, seq_len)[:, None]
    key_position = np.arange(seq_len)[None]
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.astype(np.float64)[:, None, None] * (key_position - position)
    allowed = key_position <= position
    if sliding_window is not None:
        allowed &= key_position > position - sliding_window
    scores = np.where(allowed[None], scores, -np.inf)
    if sinks is None:
        sinks = np.full(num_heads, -np.inf)
    sink = sinks.astype(np.float64)[:, None, None]
    maximum = np.maximum(scores.max(axis=-1, keepdims=True, initial=-1e30), sink)
    weights = np.exp(scores - maximum)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sink - maximum)
    return np.einsum("hqc,chd->qhd", weights / total, values), (np.log(total) + maximum)[..., 0].T


def _context(
    pages: Float[np.ndarray, "P K S D"], block_table: Int[np.ndarray, " N"], seq_len: int
) -> Float[np.ndarray, "C K D"]:
    num_pages = -(-seq_len // pages.shape[2])
    held = pages[block_table[:num_pages]].astype(np.float64)
    return held.transpose(0, 2, 1, 3).reshape(-1, pages.shape[1], pages.shape[3])[:seq_len]
