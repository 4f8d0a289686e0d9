"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): experts in all layers, and norms over all of q and of k."""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.attention import HeadNorm
from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import Layer
from jaxserve.layers.moe import Experts, Routing
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "num_experts_per_tok": 8,
    "num_experts": 64,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one OLMoE; `intermediate_size` is that of one expert."""

    attention_bias: bool
    routing: Routing

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS)
        hf_config.require(fields, "clip_qkv", None)
        return cls(
            **hf_config.as_llama(fields),
            attention_bias=hf_config.flag(fields, "attention_bias"),
            routing=Routing(
                num_experts=hf_config.num_experts(fields),
                num_experts_per_token=hf_config.integer(fields, "num_experts_per_tok"),
                is_normalized=hf_config.flag(fields, "norm_topk_prob"),
            ),
            rope=hf_rope.rope(fields),
        )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = replace(
        config.attention,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        head_norm=HeadNorm(norm=config.norm, gains="joint"),
    )
    experts = Experts(routing=config.routing, size=config.intermediate_size, activation=config.activation)
    return (replace(config.layer, mixer=attention, feed_forward=experts),) * config.num_layers


FAMILY = Family(Config=Config, layers=layers, doc=__doc__, features=("QK norm",))
