"""Mistral Small 4 (Mistral AI 2026, huggingface.co/mistralai/Mistral-Small-4-119B-2603): DeepSeek V3 with softmax
scores and queries that grow with their position beyond the original context.
"""

from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.attention import QueryScale
from jaxserve.models import deepseek_v2, deepseek_v3, hf_config, hf_rope
from jaxserve.models.reading import LLAMA

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 131072, "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 36,
    "n_shared_experts": 1, "num_experts": 128, "routed_scaling_factor": 1.0, "kv_lora_rank": 256, "q_lora_rank": 1024,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 64, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 4, "first_k_dense_replace": 0, "norm_topk_prob": True, "max_position_embeddings": 1048576,
    "rope_interleave": True
}  # fmt: skip

ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1
}  # fmt: skip
"""The rotary embedding of a config that says nothing of it."""


def _read(fields: dict[str, Any]) -> deepseek_v2.Config:
    hf_config.require(fields, moe_layer_freq=1)
    given = hf_rope.rope_object(fields) or ROPE
    heads = hf_config.latent_heads(fields)
    size, rotated = heads.plain_size + heads.rotated_size, heads.rotated_size
    fraction = hf_config.number(given, "partial_rotary_factor", rotated / size)
    if int(size * fraction) != rotated:
        raise CheckpointError(
            f"config.json: partial_rotary_factor {fraction:g} of a head of {size} must be qk_rope_head_dim ({rotated})"
        )
    own = ("llama_4_scaling_beta", "max_position_embeddings", "partial_rotary_factor")
    parameters = {name: value for name, value in given.items() if name not in own}
    fields |= {"rope_parameters": parameters, "rope_scaling": None, "partial_rotary_factor": 1.0}
    context = hf_config.integer(fields, "max_position_embeddings")
    original = hf_config.integer(hf_rope.rope_parameters(fields), "original_max_position_embeddings", context)
    return deepseek_v3.read(
        fields,
        sparse_layers=hf_config.sparse_layers_after_dense(fields),
        routing=deepseek_v3.routing(fields, "softmax"),
        query_scale=QueryScale(beta=hf_config.number(given, "llama_4_scaling_beta"), original_context=original),
    )


FAMILY = replace(deepseek_v2.FAMILY, defaults=DEFAULTS, read=_read, doc=__doc__, features=("query scale by position",))
