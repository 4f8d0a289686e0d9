"""dots.llm1 (rednote hilab 2025, arXiv:2506.05767): Qwen 3 with DeepSeek V3's experts."""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.attention import HeadNorm
from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import Layer
from jaxserve.layers.moe import Experts, Routing
from jaxserve.models import deepseek_v3, glm4_moe, hf_config, hf_rope
from jaxserve.models.family import Family

DEFAULTS: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 4608,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-06,
    "routed_scaling_factor": 1.0,
    "sliding_window": 4096,
    "max_window_layers": 62,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one dots.llm1; `intermediate_size` is that of layers without experts."""

    attention_bias: bool
    sliding_windows: tuple[int | None, ...]
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
            sliding_windows=hf_config.layer_windows(fields | {"use_sliding_window": True}),
            sparse_layers=hf_config.sparse_layers_after_dense(fields),
            expert_size=expert_size,
            shared_expert_size=expert_size * hf_config.integer(fields, "n_shared_experts"),
            routing=deepseek_v3.routing(fields),
            rope=hf_rope.rope(fields),
        )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = replace(
        config.attention,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        head_norm=HeadNorm(norm=config.norm),
    )
    experts = Experts(
        routing=config.routing,
        size=config.expert_size,
        activation=config.activation,
        has_selection_bias=True,
        shared=replace(config.feed_forward, size=config.shared_expert_size),
    )
    return tuple(
        replace(
            config.layer,
            mixer=replace(attention, sliding_window=window),
            feed_forward=experts if is_sparse else config.feed_forward,
        )
        for window, is_sparse in zip(config.sliding_windows, config.sparse_layers, strict=True)
    )


FAMILY = Family(Config=Config, layers=layers, names=glm4_moe.NAMES, doc=__doc__, features=("QK norm",))
