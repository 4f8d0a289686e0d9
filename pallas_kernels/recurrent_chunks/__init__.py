"""Linear recurrences of matrices over rows of several tokens, in chunks, whose states are changed where they are:
`recurrent_chunks`.
"""

from pallas_kernels.recurrent_chunks.op import recurrent_chunks
from pallas_kernels.recurrent_chunks.sm90 import MAX_BYTES, recurrent_chunks_sm90, why_not

__all__ = ["MAX_BYTES", "recurrent_chunks", "recurrent_chunks_sm90", "why_not"]
