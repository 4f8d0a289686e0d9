"""Qwen 2 and 2.5 (Yang et al. 2024, arXiv:2407.10671): Llama with biases on q, k and v, and windows on some layers."""

import dataclasses
import functools
from typing import Any

from jaxserve.layers.attention import attention_specs
from jaxserve.layers.decoder import DecoderConfig, decoder, decoder_specs
from jaxserve.layers.params import Params
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family

DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one Qwen 2."""

    sliding_windows: tuple[int | None, ...]

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS)
        return cls(
            **hf_config.as_llama(fields),
            sliding_windows=hf_config.layer_windows(fields),
            rope=hf_rope.rope(fields),
        )


def param_specs(config: Config) -> Params:
    """Declare every weight."""
    return decoder_specs(
        config,
        attention=functools.partial(attention_specs, qkv_bias=True),
    )


FAMILY = Family(Config=Config, param_specs=param_specs, layers=decoder, doc=__doc__)
