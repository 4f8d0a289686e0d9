"""Gate and up of an MLP with their activation, for many rows: of prefill, and of large decode steps."""

from pallas_kernels.gated_linear_unit.op import gated_linear_unit
from pallas_kernels.gated_linear_unit.sm90 import why_not

__all__ = ["gated_linear_unit", "why_not"]
