"""GLM (GLM Team 2024, arXiv:2406.12793): Llama with partial rotation, of neighbouring pairs."""

from typing import Any

from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.names import Names
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07, "attention_bias": True
}  # fmt: skip


def read(fields: dict[str, Any], **own: Any) -> DecoderConfig:
    """Read the Config of a GLM or of one of its relatives, which have `own`."""
    rope, has_bias = hf_rope.rope(fields, partial_rotary_factor=0.5), hf_config.flag(fields, "attention_bias")
    return read_config(DecoderConfig, fields, qkv_bias=has_bias, rope=rope, **own)


NAMES = Names(gate_up=("gate_up_proj",), is_interleaved=True)
FAMILY = Family(DecoderConfig, DEFAULTS, read, names=NAMES, doc=__doc__)
