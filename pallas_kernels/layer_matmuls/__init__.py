"""The four matmuls between the attentions of two layers, as one operation of a decode step's few rows."""

from pallas_kernels.layer_matmuls.op import Implementation, Weights, layer_matmuls, supports

__all__ = ["Implementation", "Weights", "layer_matmuls", "supports"]
