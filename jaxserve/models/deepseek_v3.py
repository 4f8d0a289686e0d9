"""DeepSeek V3 and R1 (Liu et al. 2024, arXiv:2412.19437): V2 with sigmoid routing, balanced by a learned bias.

The layer after the last one, which predicts further tokens, is loaded if it is to draft (`speculative/mtp.py`).
"""

import functools
from dataclasses import replace
from typing import Any, Literal

from jaxserve.errors import CheckpointError
from jaxserve.layers.moe import Routing
from jaxserve.models import deepseek_v2, hf_config
from jaxserve.models.reading import LLAMA

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "max_position_embeddings": 4096, "rope_interleave": True, "num_experts": 256
}  # fmt: skip


def _read(fields: dict[str, Any]) -> deepseek_v2.Config:
    return read(fields, sparse_layers=hf_config.sparse_layers_after_dense(fields), routing=routing(fields))


def read(fields: dict[str, Any], **own: Any) -> deepseek_v2.Config:
    """Read the Config of V3 or of one of its relatives, which read `own`."""
    is_interleaved = hf_config.flag(fields, "rope_interleave")
    return deepseek_v2.read(fields, mlp_bias=False, is_interleaved=is_interleaved, **own)


def routing(fields: dict[str, Any], scores: Literal["sigmoid", "softmax"] = "sigmoid") -> Routing:
    """Read how experts are chosen: by groups and scores, and if these are sigmoid ones, by a bias."""
    hf_config.require(fields, scoring_func=scores)
    if scores == "sigmoid":
        hf_config.require(fields, topk_method="noaux_tc")
    num_experts = hf_config.num_experts(fields)
    num_groups, num_chosen_groups = hf_config.expert_groups(fields, 8, 4)
    if num_experts < 2 * num_groups:
        raise CheckpointError(
            f"config.json: n_group ({num_groups}) leaves less than 2 of {num_experts} experts a group"
        )
    return Routing(
        num_experts=num_experts,
        num_experts_per_token=hf_config.integer(fields, "num_experts_per_tok"),
        scores=scores,
        is_normalized=hf_config.flag(fields, "norm_topk_prob"),
        scale=hf_config.number(fields, "routed_scaling_factor"),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        group_score="best_two",
    )


FAMILY = replace(
    deepseek_v2.FAMILY,
    defaults=DEFAULTS,
    read=_read,
    layers=functools.partial(deepseek_v2.layers, has_selection_bias=True),
    doc=__doc__,
)
