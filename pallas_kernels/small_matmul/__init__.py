"""Matmuls of a decode step: few rows, a large weight, fused with neighbouring operations."""

from pallas_kernels.small_matmul.op import Normed, matmul, matmul_then_norm
from pallas_kernels.small_matmul.reference import matmul_reference, rms_norm_reference
from pallas_kernels.small_matmul.sm90 import why_not

__all__ = ["Normed", "matmul", "matmul_reference", "matmul_then_norm", "rms_norm_reference", "why_not"]
