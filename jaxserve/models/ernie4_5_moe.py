"""ERNIE 4.5 with experts (Baidu 2025, yiyan.baidu.com/blog/publication/ERNIE_Technical_Report.pdf): experts chosen by
softmax scores and a bias, shared ones; rotation of neighbouring pairs.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.layers.embedding import lm_head_bias_spec
from jaxserve.layers.names import ExpertNames, Names
from jaxserve.layers.params import Params
from jaxserve.models import hf_config, hf_rope, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28,
    "num_attention_heads": 20, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": True, "moe_intermediate_size": 1536, "moe_k": 6,
    "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
    "moe_layer_interval": 1, "moe_norm_min": 1e-12
}  # fmt: skip

ALIASES = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
MAX_NORM_MIN = 1e-6
"""Least sum of a token's weights that `moe_norm_min` may name; sums that small do not occur."""


def _read(fields: dict[str, Any]) -> mixture.Config:
    if (least := hf_config.number(fields, "moe_norm_min")) > MAX_NORM_MIN:
        raise CheckpointError(f"config.json: moe_norm_min must be at most {MAX_NORM_MIN:g}, got {least:g}")
    fields |= {
        "num_local_experts": hf_config.integer(fields, "moe_num_experts"),
        "num_experts_per_tok": hf_config.integer(fields, "moe_k"),
    }
    return read_config(
        mixture.Config,
        fields,
        **hf_config.biases(fields, "use_bias"),
        sparse_layers=_sparse_layers(fields),
        mlp_bias=hf_config.flag(fields, "use_bias"),
        shared_expert_size=mixture.shared_size(fields, "moe_num_shared_experts", minimum=0),
        routing=mixture.read_routing(fields, is_normalized=True),
        has_selection_bias=True,
        rope=hf_rope.rope(fields, theta=500_000.0),
    )


def _sparse_layers(fields: dict[str, Any]) -> tuple[bool, ...]:
    """Return which layers have experts: each `moe_layer_interval`-th of those from the start index to the end index."""
    num_layers, step = (hf_config.integer(fields, name) for name in ("num_hidden_layers", "moe_layer_interval"))
    start = hf_config.integer(fields, "moe_layer_start_index", minimum=0)
    end = hf_config.integer(fields, "moe_layer_end_index", minimum=-1)
    end = num_layers - 1 if end == -1 else end
    return tuple(start <= index <= end and (index + 1) % step == 0 for index in range(num_layers))


def amend(specs: Params, config: mixture.Config) -> Params:
    """Declare the bias of the LM head, routers in float32, and the bias of the choice as it is stored: as one row."""
    for layer in specs["layers"]:
        if (bias := layer["mlp"].get("selection_bias")) is not None:
            layer["mlp"]["selection_bias"] = replace(bias, source_shapes=((1, *bias.shape),))
            layer["mlp"]["router"] = replace(layer["mlp"]["router"], dtype=np.float32)
    if config.mlp_bias:
        specs["lm_head_bias"] = lm_head_bias_spec(config.vocab_size)
    return specs


NAMES = Names(
    is_interleaved=True,
    experts=ExpertNames(shared="shared_experts", selection_bias="moe_statics.e_score_correction_bias"),
)
FAMILY = Family(
    mixture.Config, DEFAULTS, _read, aliases=ALIASES, layers=mixture.layers, names=NAMES, amend=amend, doc=__doc__
)
