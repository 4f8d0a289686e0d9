"""Rows sorted into groups, each multiplied by the weight of its group, which is stored as codes of 8 or 4 bits."""

from pallas_kernels.grouped_codes.op import grouped_matmul_of_codes, why_not
from pallas_kernels.grouped_codes.sm90 import tile_rows

__all__ = ["grouped_matmul_of_codes", "tile_rows", "why_not"]
