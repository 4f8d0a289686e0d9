"""Hy3 (Tencent 2026, huggingface.co/tencent/Hy3-preview): QK norm, and experts chosen by sigmoid scores and a bias.

The layers after the last one, which predict further tokens (`num_nextn_predict_layers`), are not loaded.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.attention import HeadNorm
from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import Layer
from jaxserve.layers.moe import Experts, Routing
from jaxserve.layers.names import ExpertNames, Names
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family

DEFAULTS: dict[str, Any] = {
    "vocab_size": 120832,
    "hidden_size": 4096,
    "intermediate_size": 13312,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "router_scaling_factor": 2.826,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""

ALWAYS = ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias")
"""Fields of published configs that are true in all of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one Hy3; `intermediate_size` is that of layers without experts."""

    attention_bias: bool
    mlp_bias: bool
    """Biases in layers without experts and in the shared experts."""
    sparse_layers: tuple[bool, ...]
    expert_size: int
    shared_expert_size: int
    """Intermediate size of all shared experts of a layer together."""
    routing: Routing

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS)
        for name in ALWAYS:
            hf_config.require(fields, name, True)
        expert_size = hf_config.integer(fields, "moe_intermediate_size")
        return cls(
            **hf_config.as_llama(fields),
            attention_bias=hf_config.flag(fields, "attention_bias"),
            mlp_bias=hf_config.flag(fields, "mlp_bias"),
            sparse_layers=hf_config.sparse_layers_by_type(fields),
            expert_size=expert_size,
            shared_expert_size=expert_size * hf_config.integer(fields, "num_shared_experts"),
            routing=Routing(
                num_experts=hf_config.num_experts(fields),
                num_experts_per_token=hf_config.integer(fields, "num_experts_per_tok"),
                scores="sigmoid",
                is_normalized=True,
                scale=hf_config.number(fields, "router_scaling_factor"),
            ),
            rope=hf_rope.rope(fields, theta=11_158_840.0),
        )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = replace(
        config.attention,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        head_norm=HeadNorm(norm=config.norm),
    )
    feed_forward = replace(config.feed_forward, has_bias=config.mlp_bias)
    experts = Experts(
        routing=config.routing,
        size=config.expert_size,
        activation=config.activation,
        has_selection_bias=True,
        shared=replace(feed_forward, size=config.shared_expert_size),
    )
    dense = replace(config.layer, mixer=attention, feed_forward=feed_forward)
    sparse = replace(dense, feed_forward=experts)
    return tuple(sparse if is_sparse else dense for is_sparse in config.sparse_layers)


NAMES = Names(experts=ExpertNames(router="router.gate", selection_bias="expert_bias", shared="shared_mlp"))
FAMILY = Family(Config=Config, layers=layers, names=NAMES, doc=__doc__, features=("QK norm",))
