"""Text of Qwen3-VL with experts (Bai et al. 2025, arXiv:2511.21631): Qwen 3 with other defaults."""

from dataclasses import replace
from typing import Any

from jaxserve.models import qwen3_moe
from jaxserve.models.reading import LLAMA

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 128000, "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_experts": 60, "rope_theta": 500000.0,
    "tie_word_embeddings": True
}  # fmt: skip

FIXED: dict[str, Any] = {"norm_topk_prob": True, "use_sliding_window": False}
"""Fields of Qwen 3 with experts that this family does not read."""


def _revise(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None} | FIXED


FAMILY = replace(qwen3_moe.FAMILY, defaults=qwen3_moe.DEFAULTS | DEFAULTS, revise=_revise, doc=__doc__)
