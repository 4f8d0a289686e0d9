"""The definition of paged attention, dense and row by row in float64 NumPy: what implementations are tested with."""

import numpy as np
from jaxtyping import Float, Int


def paged_attention_reference(
    q: Float[np.ndarray, "T H D"],
    k_pages: Float[np.ndarray, "P K S D"],
    v_pages: Float[np.ndarray, "P K S D"],
    *,
    block_tables: Int[np.ndarray, "B N"],
    seq_lens: Int[np.ndarray, " B"],
    query_starts: Int[np.ndarray, " B+1"],
    num_rows: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Float[np.ndarray, "T H D"]:
    """See `paged_attention`; arrays in NumPy, the result in float64."""
    out = np.zeros(q.shape, np.float64)
    for row in range(num_rows):
        tokens = slice(int(query_starts[row]), int(query_starts[row + 1]))
        seq_len, num_queries = int(seq_lens[row]), tokens.stop - tokens.start
        keys = _context(k_pages, block_tables[row], seq_len)
        values = _context(v_pages, block_tables[row], seq_len)
        sharing = q.shape[1] // keys.shape[1]
        keys, values = np.repeat(keys, sharing, axis=1), np.repeat(values, sharing, axis=1)

        scores = np.einsum("qhd,chd->hqc", q[tokens].astype(np.float64), keys) * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        position = np.arange(seq_len - num_queries, seq_len)[:, None]
        key_position = np.arange(seq_len)[None]
        allowed = key_position <= position
        if sliding_window is not None:
            allowed &= key_position > position - sliding_window
        scores = np.where(allowed[None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-1e30))
        out[tokens] = np.einsum("hqc,chd->qhd", weights / weights.sum(axis=-1, keepdims=True), values)
    return out


def _context(
    pages: Float[np.ndarray, "P K S D"], block_table: Int[np.ndarray, " N"], seq_len: int
) -> Float[np.ndarray, "C K D"]:
    num_pages = -(-seq_len // pages.shape[2])
    held = pages[block_table[:num_pages]].astype(np.float64)
    return held.transpose(0, 2, 1, 3).reshape(-1, pages.shape[1], pages.shape[3])[:seq_len]
