"""A layer of a decode step of few rows: the four matmuls between two attentions, and all of it, as one operation."""

from pallas_kernels.layer_matmuls.op import (
    Implementation,
    Weights,
    decode_layer,
    layer_matmuls,
    why_not,
    why_not_attention,
)

__all__ = ["Implementation", "Weights", "decode_layer", "layer_matmuls", "why_not", "why_not_attention"]
