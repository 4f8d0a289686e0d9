"""InternLM3 (Shanghai AI Laboratory 2025, huggingface.co/internlm/internlm3-8b-instruct): Llama with other names of its
biases.
"""

from typing import Any

from jaxserve.layers.decoder import DecoderConfig
from jaxserve.models import hf_config
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 128512, "intermediate_size": 10240, "num_hidden_layers": 48, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-05
}  # fmt: skip

ALIASES = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}


def _read(fields: dict[str, Any]) -> DecoderConfig:
    qkv_bias, bias = (hf_config.flag(fields, name) for name in ALIASES.values())
    return read_config(DecoderConfig, fields, qkv_bias=qkv_bias, out_bias=bias, mlp_bias=bias)


FAMILY = Family(DecoderConfig, DEFAULTS, _read, aliases=ALIASES, doc=__doc__)
