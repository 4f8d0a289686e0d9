"""The definition of `latent_attention` in float64 NumPy: what implementations are tested with."""

import numpy as np
from jaxtyping import Float, Int

from pallas_kernels.paging.reference import attend_reference


def latent_attention_reference(
    q: Float[np.ndarray, "T H D"],
    pages: Float[np.ndarray, "P 1 S D"],
    *,
    block_tables: Int[np.ndarray, "B N"],
    seq_lens: Int[np.ndarray, " B"],
    query_starts: Int[np.ndarray, " B+1"],
    num_rows: int,
    latent_size: int,
    scale: float,
) -> Float[np.ndarray, "T H R"]:
    """See `latent_attention`; arrays in NumPy, the result in float64."""
    out = np.zeros(q.shape)
    for row in range(num_rows):
        tokens = slice(int(query_starts[row]), int(query_starts[row + 1]))
        out[tokens], _ = attend_reference(
            q[tokens],
            pages,
            pages,
            block_table=block_tables[row],
            seq_len=int(seq_lens[row]),
            scale=scale,
            sliding_window=None,
            soft_cap=None,
            sinks=None,
            alibi_slopes=None,
        )
    return out[..., :latent_size]
