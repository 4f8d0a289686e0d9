"""Seed-OSS (ByteDance 2025, huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct): Llama with biases of q, k and v."""

from dataclasses import dataclass, replace
from typing import Any

from jaxserve.layers.layer import Layer
from jaxserve.models import llama
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 155136, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """The shape of one Seed-OSS; `attention_bias` is that of q, k and v."""

    attention_out_bias: bool


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = replace(config.attention, out_bias=config.attention_out_bias)
    return tuple(replace(layer, mixer=attention) for layer in llama.layers(config))


FAMILY = Family(Config, DEFAULTS, layers=layers, doc=__doc__)
