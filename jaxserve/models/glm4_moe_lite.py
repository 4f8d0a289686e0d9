"""GLM 4.7 Flash (Z.ai 2026, huggingface.co/zai-org/GLM-4.7-Flash): DeepSeek V3 with other sizes.

The layer after the last one, which predicts further tokens, is loaded if it is to draft (`speculative/mtp.py`).
"""

from dataclasses import replace
from typing import Any

from jaxserve.models import deepseek_v2, deepseek_v3, hf_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536,
    "num_hidden_layers": 47, "num_attention_heads": 20, "n_shared_experts": 1, "num_experts": 64,
    "routed_scaling_factor": 1.8, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "qk_nope_head_dim": 192, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "hidden_act": "silu", "max_position_embeddings": 202752, "rms_norm_eps": 1e-05, "rope_interleave": True
}  # fmt: skip


def _read(fields: dict[str, Any]) -> deepseek_v2.Config:
    routing = deepseek_v3.routing(fields)
    return deepseek_v3.read(fields, sparse_layers=hf_config.sparse_layers_by_type(fields), routing=routing)


FAMILY = replace(
    deepseek_v3.FAMILY, defaults=DEFAULTS, read=_read, aliases={"head_dim": "qk_rope_head_dim"}, doc=__doc__
)
