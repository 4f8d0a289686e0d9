"""Attention of chunks of tokens, ragged, over a paged KV cache: prefill, chunked prefill, prefix hits."""

from pallas_kernels.ragged_prefill_attention.op import ragged_prefill_attention

__all__ = ["ragged_prefill_attention"]
