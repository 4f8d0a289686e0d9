"""Ministral 3 and Mistral Medium 3.5 (Mistral AI 2025, huggingface.co/mistralai/Ministral-3-8B-Base-2512): Mistral
whose queries grow with their position beyond the original context.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.attention import QueryScale
from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import Layer
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 131072, "intermediate_size": 14336, "num_hidden_layers": 34, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-05
}  # fmt: skip

ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1
}  # fmt: skip
"""The rotary embedding of a config that says nothing of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one Ministral 3."""

    query_scale: QueryScale


def _read(fields: dict[str, Any]) -> Config:
    given = hf_rope.rope_object(fields) or ROPE
    own = ("llama_4_scaling_beta", "max_position_embeddings")  # the latter says the same as the config's
    parameters = {name: value for name, value in given.items() if name not in own}
    fields |= {"rope_parameters": parameters, "rope_scaling": None}
    original = hf_config.integer(hf_rope.rope_parameters(fields), "original_max_position_embeddings")
    return read_config(
        Config,
        fields,
        sliding_window=hf_config.optional_integer(fields, "sliding_window"),
        query_scale=QueryScale(beta=hf_config.number(given, "llama_4_scaling_beta"), original_context=original),
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = replace(config.attention, query_scale=config.query_scale)
    return (replace(config.layer, mixer=attention),) * config.num_layers


FAMILY = Family(
    Config, DEFAULTS, _read, layers=layers, doc=__doc__, features=("query scale by position", "sliding_window")
)
