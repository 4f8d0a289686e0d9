"""Phi 1, 1.5 and 2 (Gunasekar et al. 2023, arXiv:2306.11644): attention parallel to the feed-forward, biases
everywhere.
"""

import dataclasses
from typing import Any

from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.embedding import lm_head_bias_spec
from jaxserve.layers.layer import ONE_NORM, Arrangement
from jaxserve.layers.names import Names
from jaxserve.layers.params import Params
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
    "num_attention_heads": 32, "hidden_act": "gelu_new", "max_position_embeddings": 2048, "layer_norm_eps": 1e-05
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one Phi."""

    qk_layernorm: bool


def _read(fields: dict[str, Any]) -> Config:
    return read_config(
        Config,
        fields,
        **hf_config.plain_blocks(),
        norms=ONE_NORM,
        arrangement=Arrangement.PARALLEL,
        head_norm="shared" if hf_config.flag(fields, "qk_layernorm") else None,
        norm_eps=hf_config.number(fields, "layer_norm_eps"),
        rope=hf_rope.rope(fields, partial_rotary_factor=0.5),
    )


def amend(specs: Params, config: DecoderConfig) -> Params:
    """Declare the bias of the LM head, too."""
    return specs | {"lm_head_bias": lm_head_bias_spec(config.vocab_size)}


NAMES = Names(
    out="dense", q_norm="q_layernorm", k_norm="k_layernorm", up="fc1", down="fc2", norm="model.final_layernorm"
)
FAMILY = Family(Config, DEFAULTS, _read, names=NAMES, amend=amend, doc=__doc__, features=("parallel blocks",))
