"""InternLM3 (Shanghai AI Laboratory 2025, huggingface.co/internlm/internlm3-8b-instruct): Llama with other names of its
biases.
"""

from dataclasses import replace
from typing import Any

from jaxserve.layers.layer import Layer
from jaxserve.models import llama
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 128512, "intermediate_size": 10240, "num_hidden_layers": 48, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-05
}  # fmt: skip

ALIASES = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}


def layers(config: llama.Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = replace(config.attention, out_bias=config.mlp_bias)
    return tuple(replace(layer, mixer=attention) for layer in llama.layers(config))


FAMILY = Family(llama.Config, DEFAULTS, aliases=ALIASES, layers=layers, doc=__doc__)
