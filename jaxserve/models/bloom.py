"""BLOOM (BigScience 2022, arXiv:2211.05100): positions by ALiBi, a norm after the embedding, biases everywhere."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.errors import CheckpointError
from jaxserve.layers.alibi import alibi_slopes
from jaxserve.layers.attention import Scores, attention_specs, self_attention
from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.decoder import Attend, Mlp, Names, Norm, decoder_specs, plain_layers, sequential_block
from jaxserve.layers.embedding import embed
from jaxserve.layers.mlp import mlp, mlp_specs
from jaxserve.layers.norm import layer_norm, layer_norm_specs
from jaxserve.layers.params import Params
from jaxserve.models import hf_config
from jaxserve.models.family import Family

NAMES = Names(
    embed="transformer.word_embeddings", layers="transformer.h", attention="self_attention", norm="transformer.ln_f"
)

DEFAULTS: dict[str, Any] = {
    "vocab_size": 250880,
    "hidden_size": 64,
    "n_layer": 2,
    "n_head": 8,
    "layer_norm_epsilon": 1e-05,
    "tie_word_embeddings": True,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""

ALIASES = {"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of one BLOOM."""

    activation: ClassVar[str] = "gelu_new"
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    max_position_embeddings: int
    """The context length it was trained with; ALiBi itself has no limit."""
    norm_eps: float
    tie_word_embeddings: bool
    apply_residual_connection_post_layernorm: bool
    """If true, updates are added to the normalised input of a block instead of the residual stream before the norm."""
    alibi_slopes: tuple[float, ...]

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS, aliases=ALIASES)
        if hf_config.flag(fields, "slow_but_exact") and hf_config.integer(fields, "pretraining_tp", 1) > 1:
            # This mode leaves out biases that the checkpoint has.
            raise CheckpointError("config.json: slow_but_exact with a pretraining_tp above 1 is not supported")
        num_heads = hf_config.integer(fields, "n_head")
        return cls(
            vocab_size=hf_config.integer(fields, "vocab_size"),
            hidden_size=hf_config.integer(fields, "hidden_size"),
            num_layers=hf_config.integer(fields, "n_layer"),
            num_heads=num_heads,
            head_dim=hf_config.quotient(fields, "hidden_size", "n_head"),
            max_position_embeddings=hf_config.integer(fields, "seq_length", 2048),
            norm_eps=hf_config.number(fields, "layer_norm_epsilon"),
            tie_word_embeddings=hf_config.flag(fields, "tie_word_embeddings"),
            apply_residual_connection_post_layernorm=hf_config.flag(fields, "apply_residual_connection_post_layernorm"),
            alibi_slopes=alibi_slopes(num_heads),
        )


def param_specs(config: Config) -> Params:
    """Declare every weight."""
    specs = decoder_specs(
        config,
        attention=functools.partial(
            attention_specs, qkv_bias=True, out_bias=True, by_kv_head=True, inputs=("query_key_value",), output="dense"
        ),
        mlp=functools.partial(
            mlp_specs, intermediate_size=4 * config.hidden_size, up="dense_h_to_4h", down="dense_4h_to_h"
        ),
        norm=layer_norm_specs,
        names=NAMES,
    )
    specs["embed_norm"] = layer_norm_specs(f"{NAMES.embed}_layernorm", config.hidden_size)
    return specs


def _norm_as_residual_block(
    layer: Params,
    x: Array,
    update: Any,
    cache: Any,
    *,
    attend: Attend,
    mlp: Mlp,
    norm: Norm,
) -> tuple[Array, Array, Any]:
    """Run attention, then the feed-forward; each update is added to its own input, the norm of the residual stream."""
    x = norm(x if update is None else x + update, layer["attention_norm"])
    update, cache = attend(layer["attention"], x, cache)
    x = norm(x + update, layer["mlp_norm"])
    return x, mlp(layer["mlp"], x), cache


def embed_tokens(params: Params, config: Config, batch: Batch) -> Float[Array, "T E"]:
    """Return normalised rows of the embedding."""
    return layer_norm(embed(params["embed"], batch), params["embed_norm"], config.norm_eps)


def layers(
    params: Params, config: Config, x: Float[Array, "T E"], batch: Batch, kv_cache: KVCache, span: range
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run these layers: see `Family.layers`."""
    norm = functools.partial(layer_norm, eps=config.norm_eps)
    attend = functools.partial(
        self_attention,
        rotation=None,
        scores=Scores(scale=config.head_dim**-0.5, alibi_slopes=jnp.asarray(config.alibi_slopes, jnp.float32)),
    )
    arrange = _norm_as_residual_block if config.apply_residual_connection_post_layernorm else sequential_block
    return plain_layers(
        params, config, x, batch, kv_cache, span, attend=attend, norm=norm, feed_forward=mlp, arrange=arrange
    )


FAMILY = Family(
    Config=Config,
    param_specs=param_specs,
    embed=embed_tokens,
    layers=layers,
    doc=__doc__,
    features=("embedding norm",),
    own_layers="ALiBi, layer norms and biases",
)
