"""Matmuls of a decode step's few rows and weights of 8 or 4 bits, which are dequantized in registers."""

from pallas_kernels.device.codes import Code
from pallas_kernels.quantized_matmuls.matrix import QuantizedMatrix, scaling_of, vectors_of_outputs, why_not_factors
from pallas_kernels.quantized_matmuls.op import quantized_layer_matmuls, quantized_matmul, why_no_layer, why_not

__all__ = [
    "Code",
    "QuantizedMatrix",
    "quantized_layer_matmuls",
    "quantized_matmul",
    "scaling_of",
    "vectors_of_outputs",
    "why_no_layer",
    "why_not",
    "why_not_factors",
]
