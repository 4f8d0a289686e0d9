"""Reduce partial sums over devices, and apply what a layer does with the sum next, in one kernel."""

from pallas_kernels.all_reduce.op import all_reduce, all_reduce_add_rms_norm
from pallas_kernels.all_reduce.sm90 import why_not

__all__ = ["all_reduce", "all_reduce_add_rms_norm", "why_not"]
