"""The definition of `paged_attention` in float64 NumPy: what implementations are tested with."""

import numpy as np
from jaxtyping import Float, Int

from pallas_kernels.paging import Pages, Scores
from pallas_kernels.paging.reference import attend_reference


def paged_attention_reference(
    q: Float[np.ndarray, "B Q H D"],
    pages: Pages,
    *,
    block_tables: Int[np.ndarray, "B N"],
    seq_lens: Int[np.ndarray, " B"],
    scores: Scores,
) -> tuple[Float[np.ndarray, "B Q H D"], Float[np.ndarray, "B Q H"]]:
    """See `paged_attention`; arrays in NumPy, the results in float64."""
    out, lse = np.zeros(q.shape), np.full(q.shape[:-1], -np.inf)
    for row, seq_len in enumerate(seq_lens.tolist()):
        num_queries = 0 if seq_len == 0 else q.shape[1]
        out[row, :num_queries], lse[row, :num_queries] = attend_reference(
            q[row, :num_queries],
            pages,
            block_table=block_tables[row],
            seq_len=seq_len,
            scores=scores,
        )
    return out, lse
