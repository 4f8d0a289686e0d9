"""Rows sorted into groups, each multiplied by the weight of its group: the matmuls of a mixture of experts."""

from pallas_kernels.grouped_matmul.op import check_groups, grouped_matmul
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.grouped_matmul.tiles import Plan, max_tiles, num_used, plan, tile_rows
from pallas_kernels.grouped_matmul.xla import finished, multiply_used_groups

__all__ = [
    "Plan",
    "check_groups",
    "finished",
    "grouped_matmul",
    "grouped_matmul_reference",
    "max_tiles",
    "multiply_used_groups",
    "num_used",
    "plan",
    "tile_rows",
]
