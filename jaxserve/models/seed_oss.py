"""Seed-OSS (ByteDance 2025, huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct): Llama with biases of q, k and v."""

from typing import Any

from jaxserve.layers.decoder import DecoderConfig
from jaxserve.models import hf_config
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 155136, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True
}  # fmt: skip


def _read(fields: dict[str, Any]) -> DecoderConfig:
    names = {"qkv_bias": "attention_bias", "out_bias": "attention_out_bias", "mlp_bias": "mlp_bias"}
    return read_config(DecoderConfig, fields, **{own: hf_config.flag(fields, name) for own, name in names.items()})


FAMILY = Family(DecoderConfig, DEFAULTS, _read, doc=__doc__)
