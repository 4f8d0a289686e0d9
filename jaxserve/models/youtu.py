"""Youtu-LLM (Tencent 2025, arXiv:2512.24618): DeepSeek V3 without experts.

Transformers 5.23 sets the embedding of `pad_token_id` to 0 after it has loaded it; here it is the checkpoint's.
"""

from dataclasses import replace
from typing import Any

from jaxserve.layers.layer import Layer
from jaxserve.models import deepseek_v2, hf_config
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "max_position_embeddings": 131072, "rope_interleave": True, "tie_word_embeddings": True
}  # fmt: skip


def _read(fields: dict[str, Any]) -> deepseek_v2.DenseConfig:
    return read_config(
        deepseek_v2.DenseConfig,
        fields,
        mlp_bias=False,
        is_interleaved=hf_config.flag(fields, "rope_interleave"),
        **deepseek_v2.read_latents(fields),
    )


def layers(config: deepseek_v2.DenseConfig) -> tuple[Layer, ...]:
    """Return the layers."""
    return (config.layer,) * config.num_layers


FAMILY = replace(
    deepseek_v2.FAMILY, Config=deepseek_v2.DenseConfig, defaults=DEFAULTS, read=_read, layers=layers, doc=__doc__
)
