"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): experts in all layers, and norms over all of q and of k."""

import dataclasses
from typing import Any

from jaxserve.models import hf_config, hf_rope, mixture
from jaxserve.models.family import Family

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "num_experts_per_tok": 8,
    "num_experts": 64,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(mixture.Config):
    """The shape of one OLMoE."""

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS)
        hf_config.require(fields, "clip_qkv", None)
        return cls(
            **mixture.read(fields, "intermediate_size") | mixture.read_biases(fields),
            head_norm="joint",
            routing=mixture.read_routing(fields),
            rope=hf_rope.rope(fields),
        )


FAMILY = Family(Config=Config, layers=mixture.layers, doc=__doc__, features=("QK norm",))
