"""MiniMax M2, M2.1, M2.5 and M2.7 (MiniMax 2025, github.com/MiniMax-AI/MiniMax-M2): experts chosen by sigmoid scores
and a bias; norms over all of q and of k; partial rotation.
"""

from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.names import ExpertNames, Names
from jaxserve.models import hf_config, hf_rope, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608,
    "num_experts_per_tok": 8, "num_experts": 256
}  # fmt: skip

FULL_ATTENTION = 1
"""The kind of a layer's attention in `attn_type_list`; others are those of MiniMax-01."""


def _read(fields: dict[str, Any]) -> mixture.Config:
    hf_config.require(fields, qk_norm_type="per_layer", use_qk_norm=True, shared_intermediate_size=0)
    hf_config.require(fields, scoring_func="sigmoid", use_routing_bias=True)
    kinds = fields.get("attn_type_list") or []
    if not isinstance(kinds, list) or any(kind != FULL_ATTENTION for kind in kinds):
        raise CheckpointError(f"config.json: attn_type_list must be of {FULL_ATTENTION} only, got {kinds!r:.100}")
    size = hf_config.head_dim(fields)
    rotated = hf_config.integer(fields, "rotary_dim", size)
    if rotated % 2 or rotated > size:
        raise CheckpointError(f"config.json: rotary_dim must be even and at most head_dim ({size}), got {rotated}")
    return read_config(
        mixture.Config,
        fields,
        expert_size=hf_config.integer(fields, "intermediate_size"),
        head_norm="joint",
        routing=mixture.read_routing(fields, scores="sigmoid", is_normalized=True),
        has_selection_bias=True,
        rope=hf_rope.rope(fields, theta=5_000_000.0, partial_rotary_factor=rotated / size),
    )


NAMES = Names(
    mlp="block_sparse_moe", experts=ExpertNames(gate="w1", up="w3", down="w2", selection_bias="e_score_correction_bias")
)
FAMILY = Family(mixture.Config, DEFAULTS, _read, layers=mixture.layers, names=NAMES, doc=__doc__, features=("QK norm",))
