"""Granite 3 with experts and PowerMoE (Granite Team 2024, github.com/ibm-granite/granite-3.0-language-models): Granite
with experts in all layers.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.layer import Layer
from jaxserve.layers.moe import Experts, Routing
from jaxserve.layers.names import ExpertNames, Names
from jaxserve.models import granite, hf_config
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = granite.DEFAULTS | {"num_experts_per_tok": 2, "num_experts": 8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(granite.Config):
    """The shape of one Granite with experts; `intermediate_size` is that of one expert."""

    routing: Routing


def _read(fields: dict[str, Any]) -> Config:
    routing = Routing(
        num_experts=hf_config.num_experts(fields),
        num_experts_per_token=hf_config.integer(fields, "num_experts_per_tok"),
        scores="softmax_of_chosen",
    )
    return read_config(Config, fields, routing=routing)


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    experts = Experts(routing=config.routing, size=config.intermediate_size, activation=config.activation)
    return tuple(replace(layer, feed_forward=experts) for layer in granite.layers(config))


NAMES = Names(
    mlp="block_sparse_moe",
    experts=ExpertNames(router="router.layer", fused=("input_linear.weight", "output_linear.weight")),
)
FAMILY = replace(granite.FAMILY, Config=Config, defaults=DEFAULTS, read=_read, layers=layers, names=NAMES, doc=__doc__)
