"""Hy3 (Tencent 2026, huggingface.co/tencent/Hy3-preview): QK norm, and experts chosen by sigmoid scores and a bias.

The layers after the last one, which predict further tokens (`num_nextn_predict_layers`), are not loaded.
"""

from typing import Any

from jaxserve.layers.names import ExpertNames, Names
from jaxserve.models import hf_config, hf_rope, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 120832, "intermediate_size": 13312, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
    "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536,
    "router_scaling_factor": 2.826
}  # fmt: skip

ALWAYS = ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias")
"""Fields of published configs that are true in all of them."""


def _read(fields: dict[str, Any]) -> mixture.Config:
    hf_config.require(fields, **dict.fromkeys(ALWAYS, True))
    scale = hf_config.number(fields, "router_scaling_factor")
    return read_config(
        mixture.Config,
        fields,
        **hf_config.biases(fields),
        sparse_layers=hf_config.sparse_layers_by_type(fields),
        mlp_bias=hf_config.flag(fields, "mlp_bias"),
        head_norm="shared",
        shared_expert_size=mixture.shared_size(fields, "num_shared_experts"),
        routing=mixture.read_routing(fields, scores="sigmoid", is_normalized=True, scale=scale),
        has_selection_bias=True,
        rope=hf_rope.rope(fields, theta=11_158_840.0),
    )


NAMES = Names(experts=ExpertNames(router="router.gate", selection_bias="expert_bias", shared="shared_mlp"))
FAMILY = Family(mixture.Config, DEFAULTS, _read, layers=mixture.layers, names=NAMES, doc=__doc__, features=("QK norm",))
