"""Attention over a paged KV cache, and the scatter that fills it: `paged_attention` and `write_kv`."""

from pallas_kernels.paged_attention.op import Implementation, paged_attention, write_kv

__all__ = ["Implementation", "paged_attention", "write_kv"]
