"""Qwen 3 with experts (Yang et al. 2025, arXiv:2505.09388): Qwen 3 with experts in all layers or some of them."""

from typing import Any

from jaxserve.models import hf_config, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "sliding_window": 4096, "decoder_sparse_step": 1,
    "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128
}  # fmt: skip


def _read(fields: dict[str, Any]) -> mixture.Config:
    return read_config(
        mixture.Config,
        fields,
        **hf_config.biases(fields),
        # The same for all layers, unlike Qwen 2 and Qwen 3 without experts.
        sliding_windows=(hf_config.used_window(fields),) * hf_config.integer(fields, "num_hidden_layers"),
        sparse_layers=hf_config.sparse_layers(fields),
        head_norm="shared",
        routing=mixture.read_routing(fields),
    )


FAMILY = Family(mixture.Config, DEFAULTS, _read, layers=mixture.layers, doc=__doc__, features=("QK norm",))
