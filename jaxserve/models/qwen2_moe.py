"""Qwen 2 with experts (Yang et al. 2024, arXiv:2407.10671): a few are chosen per token, and a gated one is shared by
all.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import Layer
from jaxserve.layers.moe import Experts, Routing
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family

DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "qkv_bias": True,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one Qwen 2 with experts; `intermediate_size` is that of layers without."""

    qkv_bias: bool
    sliding_windows: tuple[int | None, ...]
    sparse_layers: tuple[bool, ...]
    expert_size: int
    shared_expert_size: int
    routing: Routing

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS)
        return cls(
            **hf_config.as_llama(fields),
            qkv_bias=hf_config.flag(fields, "qkv_bias"),
            sliding_windows=_windows(fields),
            sparse_layers=hf_config.sparse_layers(fields),
            expert_size=hf_config.integer(fields, "moe_intermediate_size"),
            shared_expert_size=hf_config.integer(fields, "shared_expert_intermediate_size"),
            routing=Routing(
                num_experts=hf_config.num_experts(fields),
                num_experts_per_token=hf_config.integer(fields, "num_experts_per_tok"),
                is_normalized=hf_config.flag(fields, "norm_topk_prob"),
            ),
            rope=hf_rope.rope(fields),
        )


def _windows(fields: dict[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's window; without `layer_types`, every other one of the first `max_window_layers` has it."""
    num_layers = hf_config.integer(fields, "num_hidden_layers")
    if not hf_config.flag(fields, "use_sliding_window"):
        if "sliding_attention" in (fields.get("layer_types") or ()):  # transformers gives these a window of 0
            raise CheckpointError("config.json: layer_types has sliding_attention, but use_sliding_window is false")
        return (None,) * num_layers
    window = hf_config.optional_integer(fields, "sliding_window")
    end = hf_config.integer(fields, "max_window_layers", minimum=0)
    default = ["sliding_attention" if i % 2 == 0 and i < end else "full_attention" for i in range(num_layers)]
    return hf_config.windows_by_type(fields, window, default)


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = replace(config.attention, qkv_bias=config.qkv_bias)
    experts = Experts(
        routing=config.routing,
        size=config.expert_size,
        activation=config.activation,
        shared=replace(config.feed_forward, size=config.shared_expert_size),
        has_shared_gate=True,
    )
    return tuple(
        replace(
            config.layer,
            mixer=replace(attention, sliding_window=window),
            feed_forward=experts if is_sparse else config.feed_forward,
        )
        for window, is_sparse in zip(config.sliding_windows, config.sparse_layers, strict=True)
    )


FAMILY = Family(Config=Config, layers=layers, doc=__doc__)
