"""Helium 1 (Kyutai 2025, huggingface.co/kyutai/helium-1-preview-2b): Llama that rotates pairs of neighbouring
dimensions, and has no bias of the attention's output.
"""

from typing import Any

from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.names import Names
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 48000, "hidden_size": 2560, "intermediate_size": 7040, "num_hidden_layers": 24,
    "num_attention_heads": 20, "num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-08
}  # fmt: skip


def _read(fields: dict[str, Any]) -> DecoderConfig:
    return read_config(
        DecoderConfig,
        fields,
        qkv_bias=hf_config.flag(fields, "attention_bias"),
        mlp_bias=hf_config.flag(fields, "mlp_bias"),
        rope=hf_rope.rope(fields, theta=100_000.0),
    )


FAMILY = Family(DecoderConfig, DEFAULTS, _read, names=Names(is_interleaved=True), doc=__doc__)
