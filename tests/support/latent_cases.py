"""Cases of latent attention, their results in float64, and the tolerances of implementations."""

import jax.numpy as jnp
import numpy as np
from kernel_results import check_tokens, in_float
from poisoned_pages import make_pages

from pallas_kernels.latent_attention.reference import latent_attention_reference
from pallas_kernels.paging import Pages

# Relative to the norm of the result. A weight is rounded to the pages' dtype, and so is the result: 8 bits and 11 bits.
TOLERANCE = {jnp.bfloat16: 2.5e-3, jnp.float16: 4e-4, jnp.float32: 2e-6}


def make_case(chunks, *, heads, sizes, num_tokens=None, max_rows=None, block_size=16, seed=0, dtype=jnp.bfloat16):
    """Arguments of `latent_attention`, arrays and then the others, and the result it should have.

    `chunks` are pairs of new tokens and context, those with one token first; `sizes` those of latent and rotated key.
    """
    rng = np.random.default_rng(seed + sum(context for _, context in chunks))
    counts = [new for new, _ in chunks]
    num_rows, size = len(chunks), sum(sizes)
    lens = [context for _, context in chunks] + [0] * ((max_rows or num_rows) - num_rows)
    assert sorted(counts, key=lambda count: count > 1) == counts
    pages, _, tables = make_pages(rng, lens, 1, size, block_size=block_size)
    starts = np.cumsum([0, *counts])
    q = rng.standard_normal((num_tokens or starts[-1], heads, size)).astype(np.float32)
    q[starts[-1] :] = np.nan
    q, pages = (jnp.asarray(x).astype(dtype) for x in (q, pages))
    pages = Pages(pages, pages)
    layout = {
        "block_tables": tables,
        "seq_lens": np.array(lens, np.int32),
        "query_starts": np.pad(starts, (0, len(lens) - num_rows), mode="edge").astype(np.int32),
    }
    options = {"latent_size": sizes[0], "scale": size**-0.5}
    want = latent_attention_reference(*in_float((q, pages)), **layout, num_rows=num_rows, **options)
    layout = {name: jnp.asarray(x) for name, x in layout.items()}
    layout |= {"num_decode_rows": jnp.int32(counts.count(1)), "num_rows": jnp.int32(num_rows)}
    is_decode_only = set(counts) <= {1} and q.shape[0] == len(lens)
    return (q, pages), layout, options | {"is_decode_only": is_decode_only}, want


def check(got, want):
    check_tokens(got, want, TOLERANCE[got.dtype.type])
