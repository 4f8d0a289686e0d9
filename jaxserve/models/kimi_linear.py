"""Kimi Linear (Kimi Team 2025, arXiv:2510.26692): three of four layers with the delta rule, decays of which are by
channel; the fourth has latent attention without positions; DeepSeek V3's experts.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.kimi_delta import KimiDelta
from jaxserve.layers.layer import Layer
from jaxserve.layers.names import ExpertNames, Names
from jaxserve.models import deepseek_v2, deepseek_v3, hf_config, mixture
from jaxserve.models.family import Family
from jaxserve.models.qwen3_next import DELTA_NET
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
    "num_hidden_layers": 27, "num_key_value_heads": None, "n_shared_experts": 1, "routed_scaling_factor": 2.446,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-05, "num_experts": 256, "linear_head_dim": 128, "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4
}  # fmt: skip

ALIASES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}

PERIOD = 4
"""Without a list of layers, every one of this number but the first attends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(deepseek_v2.Config):
    """The shape of one Kimi Linear; `intermediate_size` is that of layers without experts."""

    attends: tuple[bool, ...]
    delta: KimiDelta


def _revise(fields: dict[str, Any]) -> dict[str, Any]:
    """Take what the published config has in an object, which counts more than the fields beside it."""
    own = fields.get("linear_attn_config")
    if own is None:
        return fields
    if not isinstance(own, dict):
        raise CheckpointError(f"config.json: linear_attn_config must be an object, got {own!r:.100}")
    names = {
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    fields = fields | {new: own[old] for old, new in names.items() if old in own}
    if fields.get("layer_types") is None and {"full_attn_layers", "kda_layers"} <= own.keys():
        num_layers = hf_config.integer(DEFAULTS | fields, "num_hidden_layers")
        kinds = [_kind(own, number) for number in range(1, num_layers + 1)]
        fields = fields | {"layer_types": kinds}
    return fields


def _kind(own: dict[str, Any], number: int) -> str:
    lists = {"full_attn_layers": "full_attention", "kda_layers": DELTA_NET}
    for name in lists:
        if not isinstance(own[name], list):
            raise CheckpointError(f"config.json: {name} must be a list, got {own[name]!r:.100}")
    found = [kind for name, kind in lists.items() if number in own[name]]
    if len(found) != 1:
        raise CheckpointError(f"config.json: one of {', '.join(lists)} must have layer {number}")
    return found[0]


def _read(fields: dict[str, Any]) -> Config:
    hf_config.require(fields, mla_use_nope=True, tie_word_embeddings=False, use_grouped_topk=True)
    hf_config.require(fields, moe_router_activation_func="sigmoid")
    num_layers = hf_config.integer(fields, "num_hidden_layers")
    default = ["full_attention" if index and index % PERIOD == 0 else DELTA_NET for index in range(num_layers)]
    kinds = hf_config.layer_kinds(fields, ("full_attention", DELTA_NET), default)
    return read_config(
        Config,
        fields,
        latent_heads=hf_config.latent_heads(fields),
        shared_expert_size=mixture.shared_size(fields, "n_shared_experts", 0, minimum=0),
        rope=None,
        mlp_bias=False,
        is_interleaved=False,
        sparse_layers=hf_config.sparse_layers_by_type(fields),
        routing=deepseek_v3.routing(fields),
        attends=tuple(kind != DELTA_NET for kind in kinds),
        delta=KimiDelta(
            num_heads=hf_config.integer(fields, "linear_num_heads"),
            head_size=hf_config.integer(fields, "linear_head_dim"),
            width=hf_config.integer(fields, "linear_conv_kernel_dim", minimum=2),
            activation=hf_config.activation(fields),
            norm_eps=hf_config.number(fields, "rms_norm_eps"),
        ),
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attending = deepseek_v2.layers(config, has_selection_bias=True)
    return tuple(
        layer if attends else replace(layer, mixer=config.delta)
        for layer, attends in zip(attending, config.attends, strict=True)
    )


NAMES = Names(
    mlp="",
    gate_up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    experts=ExpertNames(
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        gate="w1",
        up="w3",
        down="w2",
        selection_bias="block_sparse_moe.gate.e_score_correction_bias",
        shared="block_sparse_moe.shared_experts",
        of_shared=("gate_proj", "up_proj", "down_proj"),
    ),
)
FAMILY = Family(
    Config,
    DEFAULTS,
    _read,
    aliases=ALIASES,
    revise=_revise,
    layers=layers,
    names=NAMES,
    doc=__doc__,
    features=("delta rule with decays by channel",),
)
