"""From logits to tokens: `sample` filters each row's distribution and draws from it."""

from pallas_kernels.sampling.op import sample

__all__ = ["sample"]
