"""The definition of attention over pages, dense, one row at a time, in float64 NumPy: what implementations are tested
with.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from pallas_kernels.paging.pages import Pages
from pallas_kernels.paging.scores import Scores


def attend_reference(
    q: Float[np.ndarray, "Q H D"],
    pages: Pages,
    *,
    block_table: Int[np.ndarray, " N"],
    seq_len: int,
    scores: Scores,
) -> tuple[Float[np.ndarray, "Q H D"], Float[np.ndarray, "Q H"]]:
    """Attend with the last Q tokens of a context of `seq_len`; return the result and the log of the softmax's
    denominator.
    """
    num_queries, num_heads, _ = q.shape
    keys, values = (_context(pages, kind, block_table, seq_len) for kind in range(2))
    queries_per_head = num_heads // keys.shape[1]
    keys, values = np.repeat(keys, queries_per_head, axis=1), np.repeat(values, queries_per_head, axis=1)

    logits = np.einsum("qhd,chd->hqc", q.astype(np.float64), keys) * scores.scale
    if scores.soft_cap is not None:
        logits = scores.soft_cap * np.tanh(logits / scores.soft_cap)
    position = np.arange(seq_len - num_queries, seq_len)[:, None]
    key_position = np.arange(seq_len)[None]
    if scores.alibi_slopes is not None:
        logits = logits + np.asarray(scores.alibi_slopes, np.float64)[:, None, None] * (key_position - position)
    allowed = key_position <= position
    if scores.sliding_window is not None:
        allowed &= key_position > position - scores.sliding_window
    logits = np.where(allowed[None], logits, -np.inf)
    sinks = np.full(num_heads, -np.inf) if scores.sinks is None else scores.sinks
    sink = np.asarray(sinks, np.float64)[:, None, None]
    maximum = np.maximum(logits.max(axis=-1, keepdims=True, initial=-1e30), sink)
    weights = np.exp(logits - maximum)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sink - maximum)
    return np.einsum("hqc,chd->qhd", weights / total, values), (np.log(total) + maximum)[..., 0].T


def _context(pages: Pages, kind: int, block_table: Int[np.ndarray, " N"], seq_len: int) -> Float[np.ndarray, "C K D"]:
    """Return the keys (kind 0) or values (1) of a row."""
    pool: Any = pages[kind]
    used = block_table[: -(-seq_len // pool.shape[2])]
    held = pool[used].astype(np.float64)
    if pages.scales is not None:
        held = held * np.asarray(pages.scales, np.float64)[used, :, -1 if kind else 0, :, None]
    return held.transpose(0, 2, 1, 3).reshape(-1, pool.shape[1], pool.shape[3])[:seq_len]
