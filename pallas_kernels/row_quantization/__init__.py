"""Rounding of rows to 8 bits, alone and with what stands before it: between two matmuls of 8 bits."""

from pallas_kernels.device.rows import why_not_row as why_not
from pallas_kernels.row_quantization.op import (
    add_rms_norm_and_quantize,
    best_implementation,
    gate_and_quantize,
    quantize_rows,
    why_not_gated,
)
from pallas_kernels.row_quantization.rounding import CODES, QuantizedRows, UnscaledProduct

__all__ = [
    "CODES",
    "QuantizedRows",
    "UnscaledProduct",
    "add_rms_norm_and_quantize",
    "best_implementation",
    "gate_and_quantize",
    "quantize_rows",
    "why_not",
    "why_not_gated",
]
