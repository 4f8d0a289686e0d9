"""GPT-J (Wang and Komatsuzaki 2021): attention parallel to the feed-forward, rotation of neighbouring pairs."""

from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import ONE_NORM, Arrangement
from jaxserve.layers.names import Names
from jaxserve.layers.rope import Rope
from jaxserve.models import gpt2, hf_config, phi
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05
}  # fmt: skip


def _read(fields: dict[str, Any]) -> DecoderConfig:
    hidden_size, num_heads = (hf_config.integer(fields, name) for name in ("n_embd", "n_head"))
    head_dim = hf_config.quotient(fields, "n_embd", "n_head")
    rotary_dim = hf_config.integer(fields, "rotary_dim")
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise CheckpointError(
            f"config.json: rotary_dim must be even and at most n_embd / n_head ({head_dim}), got {rotary_dim}"
        )
    return read_config(
        DecoderConfig,
        fields,
        norm_kind="layer",
        norms=ONE_NORM,
        arrangement=Arrangement.PARALLEL,
        is_gated=False,
        mlp_bias=True,
        hidden_size=hidden_size,
        intermediate_size=hf_config.integer(fields, "n_inner", 4 * hidden_size),
        num_layers=hf_config.integer(fields, "n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position_embeddings=hf_config.integer(fields, "n_positions"),
        norm_eps=hf_config.number(fields, "layer_norm_epsilon"),
        activation=hf_config.activation(fields, "activation_function"),
        rope=Rope(head_dim=rotary_dim, theta=10000.0),
    )


NAMES = Names(
    embed="transformer.wte",
    layers="transformer.h",
    norm="transformer.ln_f",
    attention_norm="ln_1",
    attention="attn",
    out="out_proj",
    up="fc_in",
    down="fc_out",
    is_interleaved=True,
)
FAMILY = Family(
    DecoderConfig,
    DEFAULTS,
    _read,
    aliases=gpt2.ALIASES,
    names=NAMES,
    amend=phi.amend,
    doc=__doc__,
    features=("parallel blocks",),
)
