"""InternLM3 (Shanghai AI Laboratory 2025, huggingface.co/internlm/internlm3-8b-instruct): Llama with other names of its
biases.
"""

from dataclasses import dataclass, replace
from typing import Any

from jaxserve.layers.layer import Layer
from jaxserve.models import hf_config, llama
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 128512,
    "intermediate_size": 10240,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""

ALIASES = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}


@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """The shape of one InternLM3: `attention_bias` is that of q, k and v, `mlp_bias` that of all other matrices."""

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS, aliases=ALIASES)
        return read_config(cls, fields)


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = replace(llama.attention(config), out_bias=config.mlp_bias)
    return tuple(replace(layer, mixer=attention) for layer in llama.layers(config))


FAMILY = Family(Config=Config, layers=layers, doc=__doc__)
