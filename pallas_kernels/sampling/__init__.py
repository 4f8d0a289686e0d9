"""From logits to tokens: `sample` filters each row's distribution and draws from it."""

from pallas_kernels.sampling.op import Implementation, sample

__all__ = ["Implementation", "sample"]
