"""Phi 3, 3.5 and 4 mini (Abdin et al. 2024, arXiv:2404.14219): Llama with fused checkpoints and LongRoPE."""

import dataclasses
import functools
import math
from typing import Any

from jaxtyping import Array, Float

from jaxserve.errors import CheckpointError
from jaxserve.layers.attention import AttentionFn, KVSpec, attention_specs
from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.decoder import decoder, decoder_specs
from jaxserve.layers.embedding import embed, unembed
from jaxserve.layers.mlp import gated_mlp, gated_mlp_specs
from jaxserve.layers.params import Params
from jaxserve.layers.rope import LongRopeScaling, Rope
from jaxserve.models import hf_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of one Phi 3."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    sliding_window: int | None
    rope: Rope
    """For models served up to `original_max_position_embeddings`; `long_rope` is for those served beyond it."""
    long_rope: Rope
    original_max_position_embeddings: int

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """From the fields of config.json. Raises CheckpointError, naming the field that is missing or unknown."""
        rope, long_rope, original_max_position_embeddings = _ropes(fields)
        return cls(
            vocab_size=hf_config.integer(fields, "vocab_size"),
            hidden_size=hf_config.integer(fields, "hidden_size"),
            intermediate_size=hf_config.integer(fields, "intermediate_size"),
            num_layers=hf_config.integer(fields, "num_hidden_layers"),
            num_heads=hf_config.integer(fields, "num_attention_heads"),
            num_kv_heads=hf_config.num_kv_heads(fields),
            head_dim=hf_config.head_dim(fields),
            max_position_embeddings=hf_config.integer(fields, "max_position_embeddings"),
            norm_eps=hf_config.number(fields, "rms_norm_eps"),
            activation=hf_config.activation(fields),
            tie_word_embeddings=hf_config.flag(fields, "tie_word_embeddings"),
            sliding_window=hf_config.optional_integer(fields, "sliding_window", None),
            rope=rope,
            long_rope=long_rope,
            original_max_position_embeddings=original_max_position_embeddings,
        )


def _ropes(fields: dict[str, Any]) -> tuple[Rope, Rope, int]:
    """Rotary embedding within the original context and beyond it, and the length of this context.

    The lists "short_factor" and "long_factor" stretch the wavelengths of the one and the other.
    """
    context = hf_config.integer(fields, "max_position_embeddings")
    parameters = hf_config.rope_parameters(fields)
    plain = parameters | {"rope_type": "default"}
    rope = hf_config.rope(fields | {"rope_parameters": plain}, partial_rotary_factor=1.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return rope, rope, context
    if kind not in ("longrope", "su", "yarn"):  # three names of one thing
        raise CheckpointError(f"config.json: unknown rope_type {kind!r}; known are default, longrope")
    original = hf_config.integer(parameters, "original_max_position_embeddings", minimum=2)
    stretch = hf_config.number(parameters, "factor", context / original)
    default = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    attention_factor = hf_config.number(parameters, "attention_factor", default)

    def scaled(name: str) -> Rope:
        factors = hf_config.numbers(parameters, name, rope.head_dim // 2)
        return dataclasses.replace(rope, scaling=LongRopeScaling(factors=factors, attention_factor=attention_factor))

    return scaled("short_factor"), scaled("long_factor"), original


def param_specs(config: Config) -> Params:
    """The declaration of every weight."""
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
            inputs=("qkv_proj",),
        ),
        mlp=functools.partial(
            gated_mlp_specs,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            inputs=("gate_up_proj",),
        ),
    )


def kv_specs(config: Config) -> tuple[KVSpec, ...]:
    """What each layer caches."""
    return (KVSpec(config.num_kv_heads, config.head_dim, config.sliding_window),) * config.num_layers


def forward(
    params: Params, config: Config, batch: Batch, kv_cache: KVCache, attention: AttentionFn
) -> tuple[Float[Array, "T E"], KVCache]:
    """Hidden states after the final norm, and the cache with this step's keys and values in it."""
    is_long = config.max_position_embeddings > config.original_max_position_embeddings
    return decoder(
        params,
        embed(params["embed"], batch.token_ids),
        batch,
        kv_cache,
        attention=attention,
        mlp=functools.partial(gated_mlp, activation=config.activation),
        rope=config.long_rope if is_long else config.rope,
        norm_eps=config.norm_eps,
        sliding_windows=[spec.sliding_window for spec in kv_specs(config)],
    )


def logits(params: Params, config: Config, hidden: Float[Array, "N E"]) -> Float[Array, "N V"]:
    """Logits in float32."""
    return unembed(params["embed" if config.tie_word_embeddings else "lm_head"], hidden)
