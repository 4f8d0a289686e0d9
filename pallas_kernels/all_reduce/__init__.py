"""Adding up what devices have made of a sum, and what a layer does with it next, in one kernel."""

from pallas_kernels.all_reduce.op import Implementation, all_reduce, all_reduce_add_rms_norm, why_not

__all__ = ["Implementation", "all_reduce", "all_reduce_add_rms_norm", "why_not"]
