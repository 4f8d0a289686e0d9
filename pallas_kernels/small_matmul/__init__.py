"""Matmuls of a decode step: few rows, a large weight, and what stands around them."""

from pallas_kernels.small_matmul.op import Implementation, Normed, matmul, matmul_then_norm, supports

__all__ = ["Implementation", "Normed", "matmul", "matmul_then_norm", "supports"]
