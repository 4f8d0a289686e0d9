"""dots.llm1 (rednote hilab 2025, arXiv:2506.05767): Qwen 3 with DeepSeek V3's experts."""

from typing import Any

from jaxserve.models import deepseek_v3, glm4_moe, hf_config, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 152064, "hidden_size": 4608, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_hidden_layers": 62, "num_key_value_heads": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
    "max_position_embeddings": 2048, "routed_scaling_factor": 1.0, "sliding_window": 4096, "max_window_layers": 62
}  # fmt: skip


def _read(fields: dict[str, Any]) -> mixture.Config:
    return read_config(
        mixture.Config,
        fields,
        **hf_config.biases(fields),
        sliding_windows=hf_config.layer_windows(fields | {"use_sliding_window": True}),
        sparse_layers=hf_config.sparse_layers_after_dense(fields),
        head_norm="shared",
        shared_expert_size=mixture.shared_size(fields, "n_shared_experts"),
        routing=deepseek_v3.routing(fields),
        has_selection_bias=True,
    )


FAMILY = Family(
    mixture.Config, DEFAULTS, _read, layers=mixture.layers, names=glm4_moe.NAMES, doc=__doc__, features=("QK norm",)
)
