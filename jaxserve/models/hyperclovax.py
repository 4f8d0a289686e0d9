"""HyperCLOVA X SEED Think (NAVER 2025, huggingface.co/naver-hyperclovax/HyperCLOVAX-SEED-Think-14B): Granite with norms
before and after each block, and logits that are multiplied.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxtyping import Array, Float

from jaxserve.layers.context import StepContext
from jaxserve.layers.layer import SANDWICH_NORMS, Layer
from jaxserve.layers.names import Names
from jaxserve.layers.params import Params
from jaxserve.models import granite, hf_config
from jaxserve.models.family import logits
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = granite.DEFAULTS | {"attention_multiplier": None, "use_post_norm": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(granite.Config):
    """The shape of one HyperCLOVA X; `logits_scaling` is a factor."""

    use_post_norm: bool


def _read(fields: dict[str, Any]) -> Config:
    scale = hf_config.number(fields, "attention_multiplier", hf_config.head_dim(fields) ** -0.5)
    return read_config(Config, fields, attention_multiplier=scale)


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    layers = granite.layers(config)
    return tuple(replace(layer, norms=SANDWICH_NORMS) for layer in layers) if config.use_post_norm else layers


def head(params: Params, config: Config, hidden: Float[Array, "N E"], context: StepContext) -> Float[Array, "N V"]:
    """Return scaled logits in float32."""
    return logits(params, config, hidden, context) * config.logits_scaling


NAMES = Names(attention_post_norm="post_norm1", mlp_post_norm="post_norm2")
FAMILY = replace(
    granite.FAMILY, Config=Config, defaults=DEFAULTS, read=_read, layers=layers, names=NAMES, head=head, doc=__doc__
)
