"""The definition of `latent_attention` in float64 NumPy: what implementations are tested with."""

import numpy as np
from jaxtyping import Float, Int

from pallas_kernels.paging import Pages


def latent_attention_reference(
    q: Float[np.ndarray, "T H D"],
    pages: Pages,
    *,
    block_tables: Int[np.ndarray, "B N"],
    seq_lens: Int[np.ndarray, " B"],
    query_starts: Int[np.ndarray, " B+1"],
    num_rows: int,
    latent_size: int,
    scale: float,
) -> Float[np.ndarray, "T H R"]:
    """See `latent_attention`; arrays in NumPy, the result in float64."""
    out = np.zeros((*q.shape[:2], latent_size))
    for row in range(num_rows):
        tokens = slice(int(query_starts[row]), int(query_starts[row + 1]))
        seq_len, num_queries = int(seq_lens[row]), tokens.stop - tokens.start
        used = block_tables[row, : -(-seq_len // pages.k.shape[2])]
        held = np.asarray(pages.k, np.float64)[used]
        if pages.scales is not None:
            held = held * np.asarray(pages.scales, np.float64)[used, :, 0, :, None]
        context = held.reshape(-1, q.shape[2])[:seq_len].astype(np.float64)
        scores = q[tokens].astype(np.float64) @ context.T * scale
        is_seen = np.arange(seq_len)[None] <= np.arange(seq_len - num_queries, seq_len)[:, None]
        scores = np.where(is_seen[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[tokens] = weights / weights.sum(axis=-1, keepdims=True) @ context[:, :latent_size]
    return out
