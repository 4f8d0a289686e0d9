"""VaultGemma (Google 2025, arXiv:2510.15001): Gemma 2 without norms after blocks."""

from dataclasses import replace

from jaxserve.layers.layer import PRE_NORMS, Layer
from jaxserve.models import gemma2


def layers(config: gemma2.Config) -> tuple[Layer, ...]:
    """Return the layers."""
    return tuple(replace(layer, norms=PRE_NORMS) for layer in gemma2.layers(config))


FAMILY = replace(gemma2.FAMILY, layers=layers, doc=__doc__, features=())
