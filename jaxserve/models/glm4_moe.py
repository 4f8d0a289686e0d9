"""GLM 4.5, 4.6 and 4.7 (GLM Team 2025, arXiv:2508.06471): grouped heads, partial rotation, DeepSeek V3's experts.

The layer after the last one, which predicts further tokens, is loaded if it is to draft (`speculative/mtp.py`).
"""

from typing import Any

from jaxserve.layers.names import ExpertNames, Names
from jaxserve.models import deepseek_v3, hf_config, hf_rope, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 151552, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "num_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True
}  # fmt: skip


def _read(fields: dict[str, Any]) -> mixture.Config:
    return read_config(
        mixture.Config,
        fields,
        sparse_layers=hf_config.sparse_layers_after_dense(fields),
        qkv_bias=hf_config.flag(fields, "attention_bias"),
        head_norm="shared" if hf_config.flag(fields, "use_qk_norm") else None,
        shared_expert_size=mixture.shared_size(fields, "n_shared_experts", 0, minimum=0),
        routing=deepseek_v3.routing(fields),
        has_selection_bias=True,
        rope=hf_rope.rope(fields, partial_rotary_factor=0.5),
    )


NAMES = Names(experts=ExpertNames(shared="shared_experts"))
FAMILY = Family(mixture.Config, DEFAULTS, _read, layers=mixture.layers, names=NAMES, doc=__doc__)
