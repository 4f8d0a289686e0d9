"""OLMo 2 (OLMo Team 2025, arXiv:2501.00656): Llama with norms after blocks instead of before, and over all of q and
k.
"""

from dataclasses import replace
from typing import Any

from jaxserve.layers.attention import Attention, HeadNorm
from jaxserve.layers.decoder import BiasedConfig
from jaxserve.layers.layer import POST_NORMS, Layer
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 50304,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
}


def attention(config: BiasedConfig) -> Attention:
    """Return the attention block."""
    return replace(config.attention, head_norm=HeadNorm(norm=config.norm, gains="joint"))


def layers(config: BiasedConfig) -> tuple[Layer, ...]:
    """Return the layers."""
    return (replace(config.layer, mixer=attention(config), norms=POST_NORMS),) * config.num_layers


FAMILY = Family(BiasedConfig, DEFAULTS, layers=layers, doc=__doc__, features=("QK norm", "norms after blocks"))
