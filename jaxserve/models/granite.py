"""Granite 3 (Granite Team 2024, github.com/ibm-granite/granite-3.0-language-models): Llama with four multipliers."""

import dataclasses
import functools
from typing import Any

from jaxtyping import Array, Float

from jaxserve.layers.attention import Scores, attention_specs, self_attention
from jaxserve.layers.batch import Batch, Kernels, KVCache
from jaxserve.layers.decoder import (
    Attend,
    DecoderConfig,
    Mlp,
    Norm,
    decoder_specs,
    plain_layers,
    sequential_block,
)
from jaxserve.layers.embedding import embed
from jaxserve.layers.mlp import gated_mlp_specs
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.params import Params
from jaxserve.layers.rope import rotations
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family, logits

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-06,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one Granite."""

    attention_bias: bool
    mlp_bias: bool
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS)
        return cls(
            **hf_config.as_llama(fields),
            attention_bias=hf_config.flag(fields, "attention_bias"),
            mlp_bias=hf_config.flag(fields, "mlp_bias"),
            embedding_multiplier=hf_config.number(fields, "embedding_multiplier"),
            attention_multiplier=hf_config.number(fields, "attention_multiplier"),
            residual_multiplier=hf_config.number(fields, "residual_multiplier"),
            logits_scaling=hf_config.number(fields, "logits_scaling"),
            rope=hf_rope.rope(fields),
        )


def param_specs(config: Config) -> Params:
    """Declare every weight."""
    return decoder_specs(
        config,
        attention=functools.partial(attention_specs, qkv_bias=config.attention_bias, out_bias=config.attention_bias),
        mlp=functools.partial(gated_mlp_specs, bias=config.mlp_bias),
    )


def embed_tokens(params: Params, config: Config, batch: Batch) -> Float[Array, "T E"]:
    """Return scaled rows of the embedding."""
    return embed(params["embed"], batch) * config.embedding_multiplier


def layers(
    params: Params, config: Config, x: Float[Array, "T E"], batch: Batch, kv_cache: KVCache, span: range
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run these layers: see `Family.layers`."""
    rotation = rotations(config.rope, batch.positions)
    norm = functools.partial(rms_norm, eps=config.norm_eps)

    attend = functools.partial(self_attention, rotation=rotation, scores=Scores(scale=config.attention_multiplier))

    def arrange(
        layer: Params, x: Array, update: Array | None, cache: Any, *, attend: Attend, mlp: Mlp, norm: Norm
    ) -> tuple[Array, Array, Any]:
        def attend_scaled(weights: Params, y: Array, cache: Any) -> tuple[Array, Any]:
            update, cache = attend(weights, y, cache)
            return update * config.residual_multiplier, cache

        def mlp_scaled(weights: Params, y: Array) -> Array:
            return mlp(weights, y) * config.residual_multiplier

        return sequential_block(layer, x, update, cache, attend=attend_scaled, mlp=mlp_scaled, norm=norm)

    return plain_layers(params, config, x, batch, kv_cache, span, attend=attend, norm=norm, arrange=arrange)


def head(params: Params, config: Config, hidden: Float[Array, "N E"], kernels: Kernels) -> Float[Array, "N V"]:
    """Return scaled logits in float32."""
    return logits(params, config, hidden, kernels) / config.logits_scaling


FAMILY = Family(
    Config=Config,
    param_specs=param_specs,
    embed=embed_tokens,
    layers=layers,
    head=head,
    doc=__doc__,
    own_layers="multipliers of updates",
)
