"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with experts instead of each layer's feed-forward."""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import Layer
from jaxserve.layers.moe import Experts, Routing
from jaxserve.layers.names import ExpertNames, Names
from jaxserve.models import hf_config, hf_rope, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05, "num_experts_per_tok": 2, "num_experts": 8
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one Mixtral; `intermediate_size` is that of one expert."""

    routing: Routing


def _read(fields: dict[str, Any]) -> Config:
    return read_config(
        Config,
        fields,
        sliding_window=hf_config.optional_integer(fields, "sliding_window"),
        routing=mixture.read_routing(fields, is_normalized=True),
        rope=hf_rope.rope(fields, theta=1e6),
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    experts = Experts(routing=config.routing, size=config.intermediate_size, activation=config.activation)
    return (replace(config.layer, feed_forward=experts),) * config.num_layers


NAMES = Names(mlp="block_sparse_moe", experts=ExpertNames(gate="w1", up="w3", down="w2"))
FAMILY = Family(Config, DEFAULTS, _read, layers=layers, names=NAMES, doc=__doc__, features=("sliding_window",))
