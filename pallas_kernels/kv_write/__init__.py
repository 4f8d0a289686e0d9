"""Fill a paged KV cache: head norms, rotary positions, and the scatter of keys and values."""

from pallas_kernels.kv_write.head_norms import HeadNorms
from pallas_kernels.kv_write.op import rope_and_write_kv
from pallas_kernels.kv_write.sm90 import why_not_written
from pallas_kernels.kv_write.xla import norm_and_rotate, rotate, write_kv, write_latents

__all__ = [
    "HeadNorms",
    "norm_and_rotate",
    "rope_and_write_kv",
    "rotate",
    "why_not_written",
    "write_kv",
    "write_latents",
]
