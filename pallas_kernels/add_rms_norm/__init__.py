"""Adding to the residual stream and normalising it, in one kernel: `add_rms_norm`, `add_normed_update`."""

from pallas_kernels.add_rms_norm.op import add_normed_update, add_rms_norm
from pallas_kernels.device.rows import why_not_row_in_parts as why_not

__all__ = ["add_normed_update", "add_rms_norm", "why_not"]
