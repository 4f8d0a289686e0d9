"""GLM 4 (GLM Team 2024, arXiv:2406.12793) of release 0414: norms before and after each block, partial rotation."""

import dataclasses
import functools
from typing import Any

from jaxtyping import Array, Float

from jaxserve.layers.attention import attention_specs, self_attention
from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.decoder import DecoderConfig, decoder_specs, plain_layers
from jaxserve.layers.mlp import gated_mlp_specs
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.params import Params
from jaxserve.layers.rope import rotations
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
    """The shape of one GLM 4."""

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


def param_specs(config: Config) -> Params:
    """Declare every weight."""
    return decoder_specs(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        tie_word_embeddings=config.tie_word_embeddings,
        attention=functools.partial(
            attention_specs,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.attention_bias,
            num_interleaved=config.rope.head_dim,
        ),
        mlp=functools.partial(
            gated_mlp_specs,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            inputs=("gate_up_proj",),
        ),
        norms={
            "attention_norm": "input_layernorm",
            "attention_post_norm": "post_self_attn_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        },
    )


def layers(
    params: Params, config: Config, x: Float[Array, "T E"], batch: Batch, kv_cache: KVCache, span: range
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run these layers: see `Family.layers`."""
    rotation = rotations(config.rope, batch.positions)
    norm = functools.partial(rms_norm, eps=config.norm_eps)
    attend = functools.partial(self_attention, rotation=rotation)
    return plain_layers(params, config, x, batch, kv_cache, span, attend=attend, norm=norm)


FAMILY = Family(
    Config=Config,
    param_specs=param_specs,
    layers=layers,
    doc=__doc__,
    features=("norms around blocks",),
    own_layers="norms around blocks",
)
