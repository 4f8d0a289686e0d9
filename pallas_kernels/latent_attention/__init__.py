"""Attention of absorbed queries over paged latents: multi-head latent attention, decode and prefill alike."""

from pallas_kernels.latent_attention.op import latent_attention

__all__ = ["latent_attention"]
