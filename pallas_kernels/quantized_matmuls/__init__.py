"""Matmuls of a decode step's few rows and weights of 8 or 4 bits, which are dequantized in registers."""

from pallas_kernels.quantized_matmuls.conversions import Code
from pallas_kernels.quantized_matmuls.matrix import PACKED_CODES, QuantizedMatrix, pack_matrix, why_not_packed
from pallas_kernels.quantized_matmuls.op import (
    Implementation,
    QuantizedWeights,
    quantized_layer_matmuls,
    quantized_matmul,
    why_no_layer,
    why_not,
)

__all__ = [
    "PACKED_CODES",
    "Code",
    "Implementation",
    "QuantizedMatrix",
    "QuantizedWeights",
    "pack_matrix",
    "quantized_layer_matmuls",
    "quantized_matmul",
    "why_no_layer",
    "why_not",
    "why_not_packed",
]
