"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): experts in all layers, and norms over all of q and of k."""

from typing import Any

from jaxserve.models import hf_config, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 16, "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
    "num_experts_per_tok": 8, "num_experts": 64
}  # fmt: skip


def _read(fields: dict[str, Any]) -> mixture.Config:
    hf_config.require(fields, clip_qkv=None)
    return read_config(
        mixture.Config,
        fields,
        **hf_config.biases(fields),
        expert_size=hf_config.integer(fields, "intermediate_size"),
        head_norm="joint",
        routing=mixture.read_routing(fields),
    )


FAMILY = Family(mixture.Config, DEFAULTS, _read, layers=mixture.layers, doc=__doc__, features=("QK norm",))
