"""GPT-2 (Radford et al. 2019): learned positions, and weights that the checkpoint stores transposed."""

import dataclasses
from dataclasses import replace
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxserve.layers.batch import Batch
from jaxserve.layers.decoder import UnrotatedConfig
from jaxserve.layers.embedding import embed, embed_positions, position_spec
from jaxserve.layers.layer import Layer
from jaxserve.layers.names import Names
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.models import hf_config
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "scale_attn_weights": True,
    "tie_word_embeddings": True
}  # fmt: skip

ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(UnrotatedConfig):
    """The shape of one GPT-2."""

    attention_scales: tuple[float, ...]
    """Factor of the attention scores in each layer."""


def _read(fields: dict[str, Any]) -> Config:
    # Scores are always summed in float32 here, which is all that reorder_and_upcast_attn asks for.
    hf_config.flag(fields, "reorder_and_upcast_attn")
    hidden_size = hf_config.integer(fields, "n_embd")
    num_layers, num_heads = hf_config.integer(fields, "n_layer"), hf_config.integer(fields, "n_head")
    head_dim = hf_config.quotient(fields, "n_embd", "n_head")
    scale = head_dim**-0.5 if hf_config.flag(fields, "scale_attn_weights") else 1.0
    by_layer = hf_config.flag(fields, "scale_attn_by_inverse_layer_idx")
    return read_config(
        Config,
        fields,
        **hf_config.plain_blocks(),
        hidden_size=hidden_size,
        intermediate_size=hf_config.integer(fields, "n_inner", 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        max_position_embeddings=hf_config.integer(fields, "n_positions"),
        norm_eps=hf_config.number(fields, "layer_norm_epsilon"),
        activation=hf_config.activation(fields, "activation_function"),
        attention_scales=tuple(scale / (index + 1 if by_layer else 1) for index in range(num_layers)),
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    mixers = (replace(config.attention, scale=scale) for scale in config.attention_scales)
    return tuple(replace(config.layer, mixer=mixer) for mixer in mixers)


def amend(specs: Params, config: Config) -> Params:
    """Declare the layers' matrices as they are stored, [inputs, outputs]; and positions."""

    def transposed(spec: ParamSpec) -> ParamSpec:
        if not spec.num_inputs:
            return spec
        shapes = tuple(shape[::-1] for shape in spec.source_shapes)
        return replace(spec, source_shapes=shapes, is_transposed=True)

    positions = position_spec(
        "transformer.wpe", num_positions=config.max_position_embeddings, hidden_size=config.hidden_size
    )
    return specs | {"layers": jax.tree.map(transposed, specs["layers"]), "positions": positions}


def embed_tokens(params: Params, config: Config, batch: Batch) -> Float[Array, "T E"]:  # noqa: ARG001
    """Return rows of the embedding, and those of positions added to them."""
    return embed(params["embed"], batch) + embed_positions(params["positions"], batch.positions)


NAMES = Names(
    embed="transformer.wte",
    layers="transformer.h",
    norm="transformer.ln_f",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    attention="attn",
    qkv=("c_attn",),
    out="c_proj",
    up="c_fc",
    down="c_proj",
)
FAMILY = Family(
    Config, DEFAULTS, _read, aliases=ALIASES, layers=layers, names=NAMES, amend=amend, embed=embed_tokens, doc=__doc__
)
