"""Apertus (Swiss AI 2025, arXiv:2509.14233): Llama with norms of heads and a feed-forward without a gate, whose
activation is learned.
"""

from dataclasses import replace
from typing import Any

from jaxserve.layers.decoder import BiasedConfig
from jaxserve.layers.layer import Layer
from jaxserve.layers.mlp import XIELU
from jaxserve.layers.names import Names
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 131072,
    "intermediate_size": 14336,
    "hidden_act": "xielu",
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-05,
}

DEFAULT_ROPE: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0
}  # fmt: skip
"""The rotation of a config without one."""


def _read(fields: dict[str, Any]) -> BiasedConfig:
    if not fields.get("rope_parameters") and not fields.get("rope_scaling"):
        fields["rope_parameters"] = DEFAULT_ROPE
    activation = "xielu" if fields["hidden_act"] == "xielu" else hf_config.activation(fields)
    rope = hf_rope.rope(fields, theta=12_000_000.0)
    return read_config(BiasedConfig, fields, activation=activation, is_gated=False, head_norm="shared", rope=rope)


def layers(config: BiasedConfig) -> tuple[Layer, ...]:
    """Return the layers."""
    activation = XIELU() if config.activation == "xielu" else config.activation
    feed_forward = replace(config.feed_forward, activation=activation)
    return (replace(config.layer, feed_forward=feed_forward),) * config.num_layers


NAMES = Names(attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm")
FAMILY = Family(BiasedConfig, DEFAULTS, _read, layers=layers, names=NAMES, doc=__doc__, features=("QK norm",))
