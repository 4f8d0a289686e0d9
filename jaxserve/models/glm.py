"""GLM (GLM Team 2024, arXiv:2406.12793): Llama with partial rotation, of neighbouring pairs."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jaxserve.layers.attention import attention_specs
from jaxserve.layers.decoder import PRE_NORMS, DecoderConfig, decoder, decoder_specs
from jaxserve.layers.mlp import gated_mlp_specs
from jaxserve.layers.params import Params
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family

DEFAULTS: dict[str, Any] = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one GLM or GLM 4."""

    attention_bias: bool

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS)
        return cls(
            **hf_config.as_llama(fields),
            attention_bias=hf_config.flag(fields, "attention_bias"),
            rope=hf_rope.rope(fields, partial_rotary_factor=0.5),
        )


def param_specs(config: Config, *, norms: Mapping[str, str] = PRE_NORMS) -> Params:
    """Declare every weight; `norms` are those of a layer."""
    return decoder_specs(
        config,
        attention=functools.partial(
            attention_specs, qkv_bias=config.attention_bias, num_interleaved=config.rope.head_dim
        ),
        mlp=functools.partial(gated_mlp_specs, inputs=("gate_up_proj",)),
        norms=norms,
    )


FAMILY = Family(Config=Config, param_specs=param_specs, layers=decoder, doc=__doc__)
