"""Matmuls of a decode step: few rows, a large weight, fused with neighbouring operations."""

from pallas_kernels.small_matmul.op import Implementation, Normed, matmul, matmul_then_norm
from pallas_kernels.small_matmul.sm90 import why_not

__all__ = ["Implementation", "Normed", "matmul", "matmul_then_norm", "why_not"]
