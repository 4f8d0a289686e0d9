"""GLM 4.5, 4.6 and 4.7 (GLM Team 2025, arXiv:2508.06471): grouped heads, partial rotation, DeepSeek V3's experts.

The layer after the last one, which predicts further tokens, is loaded if it is to draft (`speculative/mtp.py`).
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.attention import HeadNorm
from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import Layer
from jaxserve.layers.moe import Experts, Routing
from jaxserve.layers.names import ExpertNames, Names
from jaxserve.models import deepseek_v3, hf_config, hf_rope
from jaxserve.models.family import Family

DEFAULTS: dict[str, Any] = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "num_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one GLM 4.5; `intermediate_size` is that of layers without experts."""

    attention_bias: bool
    use_qk_norm: bool
    sparse_layers: tuple[bool, ...]
    expert_size: int
    shared_expert_size: int
    """Intermediate size of all shared experts of a layer together."""
    routing: Routing

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS)
        expert_size = hf_config.integer(fields, "moe_intermediate_size")
        return cls(
            **hf_config.as_llama(fields),
            attention_bias=hf_config.flag(fields, "attention_bias"),
            use_qk_norm=hf_config.flag(fields, "use_qk_norm"),
            sparse_layers=hf_config.sparse_layers_after_dense(fields),
            expert_size=expert_size,
            shared_expert_size=expert_size * hf_config.integer(fields, "n_shared_experts", 0, minimum=0),
            routing=deepseek_v3.routing(fields),
            rope=hf_rope.rope(fields, partial_rotary_factor=0.5),
        )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = replace(
        config.attention,
        qkv_bias=config.attention_bias,
        head_norm=HeadNorm(norm=config.norm) if config.use_qk_norm else None,
    )
    experts = Experts(
        routing=config.routing,
        size=config.expert_size,
        activation=config.activation,
        has_selection_bias=True,
        shared=replace(config.feed_forward, size=config.shared_expert_size) if config.shared_expert_size else None,
    )
    dense = replace(config.layer, mixer=attention)
    sparse = replace(dense, feed_forward=experts)
    return tuple(sparse if is_sparse else dense for is_sparse in config.sparse_layers)


NAMES = Names(experts=ExpertNames(shared="shared_experts"))
FAMILY = Family(Config=Config, layers=layers, names=NAMES, doc=__doc__)
