"""Linear recurrences of matrices over rows of several tokens, in chunks: `recurrent_chunks_sm90`."""

from pallas_kernels.recurrent_chunks.sm90 import MAX_BYTES, recurrent_chunks_sm90, why_not

__all__ = ["MAX_BYTES", "recurrent_chunks_sm90", "why_not"]
