"""What fills a paged KV cache: rotary positions, and the scatter of keys and values."""

from pallas_kernels.kv_write.op import Implementation, rope_and_write_kv
from pallas_kernels.kv_write.xla import rotate, write_kv, write_pages

__all__ = ["Implementation", "rope_and_write_kv", "rotate", "write_kv", "write_pages"]
