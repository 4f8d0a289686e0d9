"""GLM 4 (GLM Team 2024, arXiv:2406.12793) of release 0414: norms before and after each block, partial rotation."""

from dataclasses import replace

from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import SANDWICH_NORMS, Layer
from jaxserve.models import glm


def layers(config: DecoderConfig) -> tuple[Layer, ...]:
    """Return the layers."""
    return (replace(config.layer, norms=SANDWICH_NORMS),) * config.num_layers


NAMES = replace(glm.NAMES, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm")
FAMILY = replace(glm.FAMILY, layers=layers, names=NAMES, doc=__doc__, features=("norms around blocks",))
