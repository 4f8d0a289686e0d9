"""LFM2 and LFM2.5 with experts (Liquid AI 2025, arXiv:2511.23404): after the first layers, experts chosen by sigmoid
scores and a bias.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.layer import Layer
from jaxserve.layers.moe import Routing
from jaxserve.layers.names import ExpertNames
from jaxserve.models import hf_config, lfm2, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128_000,
    "norm_eps": 1e-05, "tie_word_embeddings": True, "conv_L_cache": 3, "num_dense_layers": 2, "num_experts_per_tok": 4,
    "num_experts": 32, "use_expert_bias": True, "routed_scaling_factor": 1.0, "norm_topk_prob": True
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(lfm2.Config):
    """The shape of one LFM2 with experts; `intermediate_size` is that of layers without."""

    num_dense_layers: int
    expert_size: int
    routing: Routing
    has_selection_bias: bool


def _read(fields: dict[str, Any]) -> Config:
    scale = hf_config.number(fields, "routed_scaling_factor")
    return read_config(
        Config,
        fields,
        **lfm2.own_fields(fields | {"full_attn_idxs": None}),
        num_dense_layers=hf_config.integer(fields, "num_dense_layers", minimum=0),
        routing=replace(mixture.read_routing(fields, scores="sigmoid", scale=scale), eps=1e-6),
        has_selection_bias=hf_config.flag(fields, "use_expert_bias"),
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    experts = mixture.experts_of(config, has_selection_bias=config.has_selection_bias)
    return tuple(
        layer if index < config.num_dense_layers else replace(layer, feed_forward=experts)
        for index, layer in enumerate(config.layers)
    )


NAMES = replace(lfm2.NAMES, experts=ExpertNames(gate="w1", up="w3", down="w2", selection_bias="expert_bias"))
FAMILY = Family(
    Config,
    DEFAULTS,
    _read,
    aliases={"tie_embedding": "tie_word_embeddings"},
    layers=layers,
    names=NAMES,
    doc=__doc__,
    features=lfm2.FEATURES,
)
