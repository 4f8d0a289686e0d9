"""Qwen 2 with experts (Yang et al. 2024, arXiv:2407.10671): a few are chosen per token, and a gated one is shared by
all.
"""

from typing import Any

from jaxserve.models import hf_config, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 32768, "sliding_window": 4096,
    "max_window_layers": 28, "decoder_sparse_step": 1, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60, "qkv_bias": True
}  # fmt: skip


def _read(fields: dict[str, Any]) -> mixture.Config:
    return read_config(
        mixture.Config,
        fields,
        sliding_windows=_windows(fields),
        sparse_layers=hf_config.sparse_layers(fields),
        qkv_bias=hf_config.flag(fields, "qkv_bias"),
        shared_expert_size=hf_config.integer(fields, "shared_expert_intermediate_size"),
        has_shared_gate=True,
        routing=mixture.read_routing(fields),
    )


def _windows(fields: dict[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's window; without `layer_types`, every other one of the first `max_window_layers` has it."""
    num_layers, window = hf_config.integer(fields, "num_hidden_layers"), hf_config.used_window(fields)
    end = 0 if window is None else hf_config.integer(fields, "max_window_layers", minimum=0)
    default = ["sliding_attention" if i % 2 == 0 and i < end else "full_attention" for i in range(num_layers)]
    return hf_config.windows_by_type(fields, window, default)


FAMILY = Family(mixture.Config, DEFAULTS, _read, layers=mixture.layers, doc=__doc__)
