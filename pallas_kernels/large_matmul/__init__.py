"""Matmuls of many rows: of prefill, and of decode steps with more rows than `small_matmul` takes."""

from pallas_kernels.large_matmul.op import Implementation, large_matmul, supports

__all__ = ["Implementation", "large_matmul", "supports"]
