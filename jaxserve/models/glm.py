"""GLM (GLM Team 2024, arXiv:2406.12793): Llama with partial rotation, of neighbouring pairs."""

import dataclasses
import functools
from typing import Any

from jaxtyping import Array, Float

from jaxserve.layers.attention import attention_specs
from jaxserve.layers.batch import Batch, Kernels, KVCache
from jaxserve.layers.decoder import DecoderConfig, decoder, decoder_specs
from jaxserve.layers.embedding import embed, unembed
from jaxserve.layers.mlp import gated_mlp_specs
from jaxserve.layers.paged_kv import KVSpec
from jaxserve.layers.params import Params
from jaxserve.models import hf_config, hf_rope

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
    """The shape of one GLM."""

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
    )


def kv_specs(config: Config) -> tuple[KVSpec, ...]:
    """Declare what each layer caches."""
    return (KVSpec(config.num_kv_heads, config.head_dim),) * config.num_layers


def forward(params: Params, config: Config, batch: Batch, kv_cache: KVCache) -> tuple[Float[Array, "T E"], KVCache]:
    """Return the hidden states after the final norm, and the cache updated with this step's keys and values."""
    x = embed(params["embed"], batch)
    return decoder(params, config, x, batch, kv_cache)


def logits(params: Params, config: Config, hidden: Float[Array, "N E"], kernels: Kernels) -> Float[Array, "N V"]:
    """Compute logits in float32."""
    return unembed(params["embed" if config.tie_word_embeddings else "lm_head"], hidden, kernels=kernels)
