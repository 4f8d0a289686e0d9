"""BLOOM (BigScience 2022, arXiv:2211.05100): positions by ALiBi, a norm after the embedding, biases everywhere."""

from typing import Any

from jaxtyping import Array, Float

from jaxserve.errors import CheckpointError
from jaxserve.layers.alibi import alibi_slopes
from jaxserve.layers.batch import Batch
from jaxserve.layers.decoder import UnrotatedConfig
from jaxserve.layers.embedding import embed
from jaxserve.layers.layer import Arrangement
from jaxserve.layers.names import Names
from jaxserve.layers.norm import layer_norm, layer_norm_specs
from jaxserve.layers.params import Params
from jaxserve.models import hf_config
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

NAMES = Names(
    embed="transformer.word_embeddings",
    layers="transformer.h",
    norm="transformer.ln_f",
    attention="self_attention",
    qkv=("query_key_value",),
    out="dense",
    is_by_kv_head=True,
    up="dense_h_to_4h",
    down="dense_4h_to_h",
)

DEFAULTS: dict[str, Any] = {
    "vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8, "layer_norm_epsilon": 1e-05,
    "tie_word_embeddings": True
}  # fmt: skip

ALIASES = {"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}


def _read(fields: dict[str, Any]) -> UnrotatedConfig:
    """Read the Config. Its context length is that it was trained with; ALiBi itself has no limit."""
    if hf_config.flag(fields, "slow_but_exact") and hf_config.integer(fields, "pretraining_tp", 1) > 1:
        # This mode leaves out biases that the checkpoint has.
        raise CheckpointError("config.json: slow_but_exact with a pretraining_tp above 1 is not supported")
    num_heads = hf_config.integer(fields, "n_head")
    is_normed = hf_config.flag(fields, "apply_residual_connection_post_layernorm")
    return read_config(
        UnrotatedConfig,
        fields,
        **hf_config.plain_blocks(),
        intermediate_size=4 * hf_config.integer(fields, "hidden_size"),
        num_layers=hf_config.integer(fields, "n_layer"),
        num_heads=num_heads,
        head_dim=hf_config.quotient(fields, "hidden_size", "n_head"),
        max_position_embeddings=hf_config.integer(fields, "seq_length", 2048),
        norm_eps=hf_config.number(fields, "layer_norm_epsilon"),
        activation="gelu_new",
        arrangement=Arrangement.NORMED_INPUTS if is_normed else Arrangement.SEQUENTIAL,
        alibi_slopes=alibi_slopes(num_heads),
    )


def amend(specs: Params, config: UnrotatedConfig) -> Params:
    """Declare the norm of the embedding, too."""
    return specs | {"embed_norm": layer_norm_specs(f"{NAMES.embed}_layernorm", config.hidden_size)}


def embed_tokens(params: Params, config: UnrotatedConfig, batch: Batch) -> Float[Array, "T E"]:
    """Return normalised rows of the embedding."""
    return layer_norm(embed(params["embed"], batch), params["embed_norm"], config.norm_eps)


FAMILY = Family(
    UnrotatedConfig,
    DEFAULTS,
    _read,
    aliases=ALIASES,
    names=NAMES,
    amend=amend,
    embed=embed_tokens,
    doc=__doc__,
    features=("embedding norm", "alibi_slopes"),
)
