"""Code common to the attentions over a paged KV cache: scores, checks, one XLA loop, one float64 reference."""

from pallas_kernels.paging.checks import why_not_pages
from pallas_kernels.paging.pages import Pages, has_scales, round_vectors
from pallas_kernels.paging.scores import Scores

__all__ = ["Pages", "Scores", "has_scales", "round_vectors", "why_not_pages"]
