"""AFM 4.5B (Arcee AI 2025, huggingface.co/arcee-ai/AFM-4.5B): Llama with a squared ReLU and no gate."""

from dataclasses import dataclass, replace
from typing import Any

from jaxserve.layers.layer import Layer
from jaxserve.layers.mlp import FeedForward
from jaxserve.models import hf_config, hf_rope, llama
from jaxserve.models.family import Family

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""


@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """The shape of one AFM."""

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS)
        return cls(
            **hf_config.as_llama(fields),
            attention_bias=hf_config.flag(fields, "attention_bias"),
            mlp_bias=hf_config.flag(fields, "mlp_bias"),
            rope=hf_rope.rope(fields),
        )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""

    def without_gate(layer: Layer) -> Layer:
        assert isinstance(layer.feed_forward, FeedForward)
        return replace(layer, feed_forward=replace(layer.feed_forward, is_gated=False))

    return tuple(map(without_gate, llama.layers(config)))


FAMILY = Family(Config=Config, layers=layers, doc=__doc__)
