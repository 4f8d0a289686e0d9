"""Solar Open (Upstage 2026, arXiv:2601.07022): grouped heads, and DeepSeek V3's experts in all layers."""

from typing import Any

from jaxserve.models import deepseek_v3, glm4_moe, hf_config, hf_rope, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 196608, "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "moe_intermediate_size": 1280, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "num_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True
}  # fmt: skip


def _read(fields: dict[str, Any]) -> mixture.Config:
    hf_config.require(fields, first_k_dense_replace=0, moe_layer_freq=1, use_qk_norm=False)
    return read_config(
        mixture.Config,
        fields,
        intermediate_size=hf_config.integer(fields, "moe_intermediate_size"),
        qkv_bias=hf_config.flag(fields, "attention_bias"),
        shared_expert_size=mixture.shared_size(fields, "n_shared_experts"),
        routing=deepseek_v3.routing(fields),
        has_selection_bias=True,
        rope=hf_rope.rope(fields, theta=1_000_000.0),
    )


FAMILY = Family(mixture.Config, DEFAULTS, _read, layers=mixture.layers, names=glm4_moe.NAMES, doc=__doc__)
