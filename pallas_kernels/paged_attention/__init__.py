"""Attention of the last few tokens of each sequence over a paged KV cache: decode and verification."""

from pallas_kernels.paged_attention.op import paged_attention

__all__ = ["paged_attention"]
