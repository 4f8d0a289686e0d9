"""OPT (Zhang et al. 2022, arXiv:2205.01068): learned positions with an offset, norms before or after each sum."""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxtyping import Array, Float

from jaxserve.layers.batch import Batch
from jaxserve.layers.context import StepContext
from jaxserve.layers.decoder import UnrotatedConfig
from jaxserve.layers.embedding import embed, embed_positions, embedding_spec, position_spec
from jaxserve.layers.layer import Arrangement, Layer
from jaxserve.layers.linear import linear
from jaxserve.layers.names import Names
from jaxserve.layers.params import Params, matrix_spec
from jaxserve.models import hf_config
from jaxserve.models.family import Family, logits
from jaxserve.models.reading import read_config

FIRST_POSITION = 2
"""Row of the position table for a text's first token."""
NORM_EPS = 1e-5

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072, "max_position_embeddings": 2048,
    "do_layer_norm_before": True, "num_attention_heads": 12, "activation_function": "relu", "enable_bias": True,
    "layer_norm_elementwise_affine": True, "tie_word_embeddings": True
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(UnrotatedConfig):
    """The shape of one OPT."""

    word_embed_proj_dim: int
    """Size of embedded tokens; if it is not hidden_size, they are projected to it and back."""
    do_layer_norm_before: bool
    has_final_norm: bool
    has_norm_weights: bool


def _read(fields: dict[str, Any]) -> Config:
    hidden_size = hf_config.integer(fields, "hidden_size")
    norm_before = hf_config.flag(fields, "do_layer_norm_before")
    final_norm_removed = hf_config.flag(fields, "_remove_final_layer_norm")
    return read_config(
        Config,
        fields,
        **hf_config.plain_blocks(has_biases=hf_config.flag(fields, "enable_bias")),
        word_embed_proj_dim=hf_config.integer(fields, "word_embed_proj_dim", hidden_size),
        intermediate_size=hf_config.integer(fields, "ffn_dim"),
        head_dim=hf_config.quotient(fields, "hidden_size", "num_attention_heads"),
        norm_eps=NORM_EPS,
        activation=hf_config.activation(fields, "activation_function"),
        has_final_norm=norm_before and not final_norm_removed,
        has_norm_weights=hf_config.flag(fields, "layer_norm_elementwise_affine"),
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    layer = replace(
        config.layer,
        norm=replace(config.norm, has_gain=config.has_norm_weights),
        arrangement=Arrangement.SEQUENTIAL if config.do_layer_norm_before else Arrangement.NORMED_SUMS,
    )
    return (layer,) * config.num_layers


def amend(specs: Params, config: Config) -> Params:
    """Declare positions, too, and matrices that widen and narrow hidden states; the final norm may be missing."""
    E, W = config.hidden_size, config.word_embed_proj_dim
    num_positions = config.max_position_embeddings + FIRST_POSITION
    specs["positions"] = position_spec("model.decoder.embed_positions", num_positions=num_positions, hidden_size=E)
    if not config.has_final_norm:
        del specs["norm"]
    if W != E:
        tables = {"embed": NAMES.embed, "lm_head": NAMES.lm_head}
        for name in tables.keys() & specs.keys():
            specs[name] = embedding_spec(tables[name], vocab_size=config.vocab_size, hidden_size=W)
        for name, shape in {"project_in": (E, W), "project_out": (W, E)}.items():
            specs[name] = matrix_spec(f"model.decoder.{name}", shape, ("embed", None), quantize=True)
    return specs


def embed_tokens(params: Params, config: Config, batch: Batch) -> Float[Array, "T E"]:  # noqa: ARG001
    """Return rows of the embedding, widened if they are narrow, and those of positions added to them."""
    x = embed(params["embed"], batch)
    if "project_in" in params:
        x = linear(x, params["project_in"])
    return x + embed_positions(params["positions"], batch.positions + FIRST_POSITION)


def head(params: Params, config: Config, hidden: Float[Array, "N E"], context: StepContext) -> Float[Array, "N V"]:
    """Return logits in float32, of narrowed hidden states if the embedding is narrow."""
    if "project_out" in params:
        hidden = linear(hidden, params["project_out"])
    return logits(params, config, hidden, context)


NAMES = Names(
    embed="model.decoder.embed_tokens",
    layers="model.decoder.layers",
    norm="model.decoder.final_layer_norm",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    out="out_proj",
    mlp="",
    up="fc1",
    down="fc2",
)
FAMILY = Family(
    Config, DEFAULTS, _read, layers=layers, names=NAMES, amend=amend, embed=embed_tokens, head=head, doc=__doc__
)
