"""Matmuls of a decode step: few rows, a large weight, and what stands around them."""

from pallas_kernels.small_matmul.op import Implementation, Normed, matmul, matmul_then_norm, supports
from pallas_kernels.small_matmul.sm90 import MAX_ROWS

__all__ = ["MAX_ROWS", "Implementation", "Normed", "matmul", "matmul_then_norm", "supports"]
