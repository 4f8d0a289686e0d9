"""Code common to the attentions over a paged KV cache: scores, checks, one XLA loop, one float64 reference."""

from pallas_kernels.paging.checks import MAX_HEAD_DIM, why_not_pages, why_not_prompts
from pallas_kernels.paging.pages import Bytes, Pages, has_scales, pool_dtype, round_vectors
from pallas_kernels.paging.scores import Scores

__all__ = [
    "MAX_HEAD_DIM",
    "Bytes",
    "Pages",
    "Scores",
    "has_scales",
    "pool_dtype",
    "round_vectors",
    "why_not_pages",
    "why_not_prompts",
]
