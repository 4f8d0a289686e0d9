"""Ling and Ring with experts, 1 and 2 (Ling Team 2025, arXiv:2503.05139): experts chosen by softmax scores in the first
generation, by sigmoid scores, groups and a bias in the second, which has QK norm and may have partial rotation.

The layers after the last one, which predict further tokens (`num_nextn_predict_layers`), are not loaded.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.moe import Routing
from jaxserve.layers.names import ExpertNames, Names
from jaxserve.layers.params import Params
from jaxserve.models import deepseek_v3, hf_config, hf_rope, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-06, "first_k_dense_replace": 0, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "num_shared_experts": 0, "rope_theta": 600_000.0
}  # fmt: skip
"""Defaults of this family's config in its own code, for fields that a config.json omits. Sizes have no defaults."""

SECOND = {
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "use_qk_norm": True,
    "n_group": 8,
    "topk_group": 4,
}
"""Further ones of the second generation."""

REQUIRED = {"use_bias": False, "multi_gate": False, "norm_softmax": False, "use_rmsnorm": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(mixture.Config):
    """The shape of one Ling."""

    has_unit_head: bool


def _read(fields: dict[str, Any]) -> Config:
    hf_config.require(fields, **REQUIRED)
    expert_size = hf_config.integer(fields, "moe_intermediate_size")
    shared_size = hf_config.integer(fields, "moe_shared_expert_intermediate_size", expert_size)
    return read_config(
        Config,
        fields,
        sparse_layers=hf_config.sparse_layers_after_dense(fields),
        qkv_bias=hf_config.flag(fields, "use_qkv_bias"),
        head_norm="shared" if hf_config.flag(fields, "use_qk_norm") else None,
        has_unit_head=hf_config.flag(fields, "norm_head"),
        shared_expert_size=shared_size * hf_config.integer(fields, "num_shared_experts", minimum=0),
        routing=_routing(fields),
        has_selection_bias=hf_config.flag(fields, "moe_router_enable_expert_bias"),
        rope=hf_rope.rope(fields, partial_rotary_factor=1.0),
    )


def _revise(fields: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of the second generation, whose checkpoints have the first one's `model_type`, too."""
    if fields.get("model_type") == "bailing_moe_v2" or fields.get("architectures") == ["BailingMoeV2ForCausalLM"]:
        return fields | {name: value for name, value in SECOND.items() if fields.get(name) is None}
    return fields


def _routing(fields: dict[str, Any]) -> Routing:
    """Read how experts are chosen."""
    scores = fields.get("score_function") or "softmax"
    if scores == "sigmoid":
        # The family's own code normalises whatever this says; vLLM and SGLang follow it.
        hf_config.require(fields, norm_topk_prob=True)
        return deepseek_v3.routing({"n_group": 1, "topk_group": 1} | fields)
    if scores != "softmax":
        raise CheckpointError(f"config.json: unknown score_function {scores!r:.100}; known are sigmoid, softmax")
    hf_config.require(fields, n_group=1, topk_group=1)
    return mixture.read_routing(fields, scale=hf_config.number(fields, "routed_scaling_factor"))


def amend(specs: Params, config: Config) -> Params:
    """Divide the columns of the LM head by their lengths."""
    if not config.has_unit_head:
        return specs
    if config.tie_word_embeddings:
        raise CheckpointError("config.json: norm_head is not supported with tie_word_embeddings")
    return specs | {"lm_head": replace(specs["lm_head"], unit_axis=0, is_absorbed=True)}


NAMES = Names(
    embed="model.word_embeddings",
    attention="attention",
    qkv=("query_key_value",),
    out="dense",
    q_norm="query_layernorm",
    k_norm="key_layernorm",
    experts=ExpertNames(shared="shared_experts", selection_bias="gate.expert_bias"),
)
FAMILY = Family(Config, DEFAULTS, _read, revise=_revise, layers=mixture.layers, names=NAMES, amend=amend, doc=__doc__)
