"""Matmuls of many rows and weights of 8 bits: of prefill, and of large decode steps."""

from pallas_kernels.scaled_matmul.op import (
    best_implementation,
    gated_matmul_and_quantize,
    scaled_matmul,
    unscaled_matmul,
    why_not,
)

__all__ = ["best_implementation", "gated_matmul_and_quantize", "scaled_matmul", "unscaled_matmul", "why_not"]
