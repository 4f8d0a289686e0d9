"""GPT-2 (Radford et al. 2019): learned positions, and weights that the checkpoint stores transposed."""

import dataclasses
import functools
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxserve.layers.attention import Scores, attention_specs, self_attention
from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.decoder import Names, decoder_specs, plain_layers
from jaxserve.layers.embedding import embed, embed_positions, position_spec
from jaxserve.layers.mlp import mlp, mlp_specs
from jaxserve.layers.norm import layer_norm, layer_norm_specs
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.models import hf_config
from jaxserve.models.family import Family

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-05,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""

ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of one GPT-2."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    attention_scales: tuple[float, ...]
    """Factor of the attention scores in each layer."""

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS, aliases=ALIASES)
        # Scores are always summed in float32 here, which is all that reorder_and_upcast_attn asks for.
        hf_config.flag(fields, "reorder_and_upcast_attn")
        hidden_size = hf_config.integer(fields, "n_embd")
        num_layers = hf_config.integer(fields, "n_layer")
        head_dim = hf_config.quotient(fields, "n_embd", "n_head")
        scale = head_dim**-0.5 if hf_config.flag(fields, "scale_attn_weights") else 1.0
        by_layer = hf_config.flag(fields, "scale_attn_by_inverse_layer_idx")
        return cls(
            vocab_size=hf_config.integer(fields, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=hf_config.integer(fields, "n_inner", 4 * hidden_size),
            num_layers=num_layers,
            num_heads=hf_config.integer(fields, "n_head"),
            head_dim=head_dim,
            max_position_embeddings=hf_config.integer(fields, "n_positions"),
            norm_eps=hf_config.number(fields, "layer_norm_epsilon"),
            activation=hf_config.activation(fields, "activation_function"),
            tie_word_embeddings=hf_config.flag(fields, "tie_word_embeddings"),
            attention_scales=tuple(scale / (index + 1 if by_layer else 1) for index in range(num_layers)),
        )


def param_specs(config: Config) -> Params:
    """Declare every weight."""

    def attention(prefix: str, config: Config) -> Params:
        return _stored_transposed(
            attention_specs(
                prefix,
                config,
                qkv_bias=True,
                out_bias=True,
                inputs=("c_attn",),
                output="c_proj",
            )
        )

    def feed_forward(prefix: str, config: Config) -> Params:
        return _stored_transposed(mlp_specs(prefix, config, up="c_fc", down="c_proj"))

    specs = decoder_specs(
        config,
        attention=attention,
        mlp=feed_forward,
        norm=layer_norm_specs,
        norms={"attention_norm": "ln_1", "mlp_norm": "ln_2"},
        names=Names(embed="transformer.wte", layers="transformer.h", attention="attn", norm="transformer.ln_f"),
    )
    specs["positions"] = position_spec(
        "transformer.wpe", num_positions=config.max_position_embeddings, hidden_size=config.hidden_size
    )
    return specs


def _stored_transposed(specs: Params) -> Params:
    """Declare the same weights, stored as [inputs, outputs] in the checkpoint."""

    def transposed(spec: ParamSpec) -> ParamSpec:
        if not spec.num_inputs:
            return spec
        shapes = tuple(shape[::-1] for shape in spec.source_shapes)
        return dataclasses.replace(spec, source_shapes=shapes, is_transposed=True)

    return jax.tree.map(transposed, specs)


def embed_tokens(params: Params, config: Config, batch: Batch) -> Float[Array, "T E"]:  # noqa: ARG001
    """Return rows of the embedding, and those of positions added to them."""
    return embed(params["embed"], batch) + embed_positions(params["positions"], batch.positions)


def layers(
    params: Params, config: Config, x: Float[Array, "T E"], batch: Batch, kv_cache: KVCache, span: range
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run these layers: see `Family.layers`."""
    norm = functools.partial(layer_norm, eps=config.norm_eps)
    attends = [
        functools.partial(self_attention, rotation=None, scores=Scores(scale=scale))
        for scale in config.attention_scales
    ]
    return plain_layers(params, config, x, batch, kv_cache, span, attend=attends, norm=norm, feed_forward=mlp)


FAMILY = Family(
    Config=Config,
    param_specs=param_specs,
    embed=embed_tokens,
    layers=layers,
    doc=__doc__,
    own_layers="layer norms and biases",
)
