"""GLM (GLM Team 2024, arXiv:2406.12793): Llama with partial rotation, of neighbouring pairs."""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import Layer
from jaxserve.layers.names import Names
from jaxserve.models import hf_rope
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07, "attention_bias": True
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one GLM or GLM 4."""

    attention_bias: bool


def _read(fields: dict[str, Any]) -> Config:
    return read_config(Config, fields, rope=hf_rope.rope(fields, partial_rotary_factor=0.5))


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = replace(config.attention, qkv_bias=config.attention_bias)
    return (replace(config.layer, mixer=attention),) * config.num_layers


NAMES = Names(gate_up=("gate_up_proj",), is_interleaved=True)
FAMILY = Family(Config, DEFAULTS, _read, layers=layers, names=NAMES, doc=__doc__)
