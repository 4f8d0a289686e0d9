"""K-EXAONE (LG AI Research 2026, arXiv:2601.01739): EXAONE 4's attention, after norms, with DeepSeek V3's experts.

The layer that predicts further tokens (`mtp.`) is not loaded.
"""

from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.names import ExpertNames, Names
from jaxserve.models import deepseek_v3, exaone4, hf_config, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = exaone4.DEFAULTS | {
    "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8, "num_shared_experts": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1
}  # fmt: skip


def _read(fields: dict[str, Any]) -> mixture.Config:
    hf_config.integer(fields, "sliding_window")
    return read_config(
        mixture.Config,
        fields,
        sliding_windows=exaone4.read_windows(fields),
        sparse_layers=_sparse_layers(fields),
        rotates_everywhere=False,
        head_norm="shared",
        shared_expert_size=mixture.shared_size(fields, "num_shared_experts"),
        routing=deepseek_v3.routing(fields),
        has_selection_bias=True,
    )


def _sparse_layers(fields: dict[str, Any]) -> tuple[bool, ...]:
    """Return which layers have experts: `mlp_layer_types` counts, and `is_moe_layer` of the first releases says the
    same.
    """
    if fields.get("mlp_layer_types") is not None:
        fields = fields | {"first_k_dense_replace": None}
    is_sparse, given = hf_config.sparse_layers_by_type(fields), fields.get("is_moe_layer")
    if given is not None and given != list(is_sparse):
        raise CheckpointError("config.json: is_moe_layer contradicts mlp_layer_types or first_k_dense_replace")
    return is_sparse


NAMES = Names(experts=ExpertNames(selection_bias="e_score_correction_bias", shared="shared_experts"))
FAMILY = Family(mixture.Config, DEFAULTS, _read, layers=mixture.layers, names=NAMES, doc=__doc__, features=("QK norm",))
