"""Mellum 2 (JetBrains 2026, huggingface.co/JetBrains/Mellum2-12B-A2.5B-Base): Qwen 3 with experts, windows by layer,
and two rotations.
"""

from typing import Any

from jaxserve.models import hf_config, hf_rope, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 98304, "hidden_size": 2304, "intermediate_size": 7168, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 131072, "sliding_window": 1024,
    "moe_intermediate_size": 896, "num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": True
}  # fmt: skip


def _read(fields: dict[str, Any]) -> mixture.Config:
    hf_config.require(fields, rope_scaling=None)
    fields = {name: value for name, value in fields.items() if name != "rope_theta"}  # which no layer type has
    num_layers = hf_config.integer(fields, "num_hidden_layers")
    size = hf_config.head_dim(fields)
    rope, local_rope = hf_rope.ropes_by_type(fields, size=size, theta=500_000.0, local_theta=None)
    window = hf_config.optional_integer(fields, "sliding_window")
    return read_config(
        mixture.Config,
        fields,
        **hf_config.biases(fields),
        sliding_windows=hf_config.windows_by_type(fields, window, ["full_attention"] * num_layers),
        sparse_layers=hf_config.sparse_layers_by_type(fields | {"first_k_dense_replace": None}, first=0),
        head_norm="shared",
        routing=mixture.read_routing(fields),
        rope=rope,
        local_rope=local_rope,
    )


FAMILY = Family(mixture.Config, DEFAULTS, _read, layers=mixture.layers, doc=__doc__, features=("QK norm", "local_rope"))
