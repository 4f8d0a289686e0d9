"""GPT-NeoX and Pythia (Black et al. 2022, arXiv:2204.06745): attention parallel to the feed-forward, partial
rotation.
"""

from typing import Any

from jaxserve.layers.decoder import BiasedConfig
from jaxserve.layers.layer import Arrangement
from jaxserve.layers.names import Names
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
    "intermediate_size": 24576, "hidden_act": "gelu", "max_position_embeddings": 2048, "layer_norm_eps": 1e-05,
    "use_parallel_residual": True, "attention_bias": True
}  # fmt: skip

ALIASES = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
"""Names of this family outside of rope_parameters, where transformers does not read the others'."""


def _revise(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in ALIASES.values()}


def _read(fields: dict[str, Any]) -> BiasedConfig:
    head_dim = hf_config.quotient(fields, "hidden_size", "num_attention_heads")
    is_parallel = hf_config.flag(fields, "use_parallel_residual")
    return read_config(
        BiasedConfig,
        fields,
        **hf_config.plain_blocks(),
        arrangement=Arrangement.PARALLEL if is_parallel else Arrangement.SEQUENTIAL,
        head_dim=head_dim,
        norm_eps=hf_config.number(fields, "layer_norm_eps"),
        rope=hf_rope.rope(fields, size=head_dim, partial_rotary_factor=0.25),
    )


NAMES = Names(
    embed="gpt_neox.embed_in",
    layers="gpt_neox.layers",
    norm="gpt_neox.final_layer_norm",
    lm_head="embed_out",
    attention="attention",
    qkv=("query_key_value",),
    out="dense",
    is_by_kv_head=True,
    up="dense_h_to_4h",
    down="dense_4h_to_h",
)
FAMILY = Family(
    BiasedConfig,
    DEFAULTS,
    _read,
    aliases=ALIASES,
    revise=_revise,
    names=NAMES,
    doc=__doc__,
    features=("parallel blocks",),
)
