"""Rows sorted into groups, each multiplied by the weight of its group: the matmuls of a mixture of experts."""

from pallas_kernels.grouped_matmul.op import Implementation, grouped_matmul
from pallas_kernels.grouped_matmul.plan import Plan, max_tiles, plan, tile_rows
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference

__all__ = ["Implementation", "Plan", "grouped_matmul", "grouped_matmul_reference", "max_tiles", "plan", "tile_rows"]
