"""The definition of `ragged_prefill_attention` in float64 NumPy: what implementations are tested with."""

import numpy as np
from jaxtyping import Float, Int

from pallas_kernels.paging import Pages, Scores
from pallas_kernels.paging.reference import attend_reference


def ragged_prefill_attention_reference(
    q: Float[np.ndarray, "T H D"],
    pages: Pages,
    before: Float[np.ndarray, "T H D"] | None = None,
    *,
    block_tables: Int[np.ndarray, "B N"],
    seq_lens: Int[np.ndarray, " B"],
    query_starts: Int[np.ndarray, " B+1"],
    first_row: int,
    num_rows: int,
    scores: Scores,
) -> Float[np.ndarray, "T H D"]:
    """See `ragged_prefill_attention`; arrays in NumPy, the result in float64."""
    out = np.zeros(q.shape)
    if before is not None:
        tokens = slice(0, int(query_starts[min(first_row, num_rows)]))
        out[tokens] = before[tokens]
    for row in range(first_row, num_rows):
        tokens = slice(int(query_starts[row]), int(query_starts[row + 1]))
        out[tokens], _ = attend_reference(
            q[tokens],
            pages,
            block_table=block_tables[row],
            seq_len=int(seq_lens[row]),
            scores=scores,
        )
    return out
