"""Qwen 2 and 2.5 (Yang et al. 2024, arXiv:2407.10671): Llama with biases on q, k and v, and windows on some layers."""

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
            qkv_bias=True,
        ),
        mlp=functools.partial(
            gated_mlp_specs,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
        ),
    )


def kv_specs(config: Config) -> tuple[KVSpec, ...]:
    """Declare what each layer caches."""
    return tuple(KVSpec(config.num_kv_heads, config.head_dim, window) for window in config.sliding_windows)


def forward(params: Params, config: Config, batch: Batch, kv_cache: KVCache) -> tuple[Float[Array, "T E"], KVCache]:
    """Return the hidden states after the final norm, and the cache updated with this step's keys and values."""
    x = embed(params["embed"], batch)
    return decoder(params, config, x, batch, kv_cache, sliding_windows=config.sliding_windows)


def logits(params: Params, config: Config, hidden: Float[Array, "N E"], kernels: Kernels) -> Float[Array, "N V"]:
    """Compute logits in float32."""
    return unembed(params["embed" if config.tie_word_embeddings else "lm_head"], hidden, kernels=kernels)
