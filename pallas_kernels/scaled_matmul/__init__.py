"""Matmuls of many rows, rounded to 8 bits row by row, and weights of 8 bits: of prefill, and of large decode steps."""

from pallas_kernels.scaled_matmul.op import Implementation, best_implementation, quantize_rows, scaled_matmul, why_not

__all__ = ["Implementation", "best_implementation", "quantize_rows", "scaled_matmul", "why_not"]
