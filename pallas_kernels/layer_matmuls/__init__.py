"""A layer of a decode step of few rows: the four matmuls between two attentions, and all of it, as one operation."""

from pallas_kernels.device.products import Weights
from pallas_kernels.layer_matmuls.op import decode_layer, layer_matmuls, why_not_attention
from pallas_kernels.layer_matmuls.sm90 import why_not

__all__ = ["Weights", "decode_layer", "layer_matmuls", "why_not", "why_not_attention"]
