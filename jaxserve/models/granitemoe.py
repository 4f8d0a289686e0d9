"""Granite 3 with experts and PowerMoE (Granite Team 2024, github.com/ibm-granite/granite-3.0-language-models): Granite
with experts in all layers, in `granitemoeshared` beside a shared one.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.layer import Layer
from jaxserve.layers.mlp import FeedForward
from jaxserve.layers.moe import Experts, Routing
from jaxserve.layers.names import ExpertNames, Names
from jaxserve.models import granite, hf_config, mixture

DEFAULTS: dict[str, Any] = granite.DEFAULTS | {
    "num_experts_per_tok": 2, "num_experts": 8, "shared_intermediate_size": 0
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(granite.Config):
    """The shape of one Granite with experts; `intermediate_size` is that of one expert, `shared_size` that of the one
    that is shared, 0 if there is none.
    """

    shared_size: int
    routing: Routing


def read[C: Config](cls: type[C], fields: dict[str, Any], **own: Any) -> C:
    """Read the Config of a Granite with experts or of one of its relatives, which read `own`."""
    routing = mixture.read_routing(fields, scores="softmax_of_chosen", is_normalized=False)
    shared_size = hf_config.integer(fields, "shared_intermediate_size", minimum=0)
    return granite.read(cls, fields, shared_size=shared_size, routing=routing, **own)


def _read(fields: dict[str, Any]) -> Config:
    return read(Config, fields)


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    shared = FeedForward(size=config.shared_size, activation=config.activation) if config.shared_size else None
    experts = Experts(
        routing=config.routing, size=config.intermediate_size, activation=config.activation, shared=shared
    )
    return tuple(replace(layer, feed_forward=experts) for layer in config.layers)


NAMES = Names(
    mlp="",  # what a layer has for its feed-forward are two modules
    experts=ExpertNames(
        router="block_sparse_moe.router.layer",
        fused=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        gate="input_linear",
        up="input_linear",
        down="output_linear",
        shared="shared_mlp",
    ),
)
FAMILY = replace(granite.FAMILY, Config=Config, defaults=DEFAULTS, read=_read, layers=layers, names=NAMES, doc=__doc__)
