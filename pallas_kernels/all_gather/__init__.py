"""The columns that devices have of rows, put together on each."""

from pallas_kernels.all_gather.op import all_gather
from pallas_kernels.all_gather.sm90 import num_pieces, why_not

__all__ = ["all_gather", "num_pieces", "why_not"]
