"""Gate and up of an MLP with their activation, for many rows: of prefill, and of large decode steps."""

from pallas_kernels.gated_linear_unit.op import Implementation, gated_linear_unit, supports

__all__ = ["Implementation", "gated_linear_unit", "supports"]
