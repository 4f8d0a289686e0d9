"""Hunyuan with experts, A13B (Tencent 2025, huggingface.co/tencent/Hunyuan-A13B-Instruct): Hunyuan with experts and a
shared one in all layers.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.decoder import BiasedConfig
from jaxserve.layers.layer import Layer
from jaxserve.layers.moe import Routing
from jaxserve.layers.names import ExpertNames
from jaxserve.models import hf_config, hunyuan_v1_dense, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = hunyuan_v1_dense.DEFAULTS | {"num_experts": 1, "moe_topk": 1}

LISTS = (
    *("num_local_experts", "num_experts", "num_experts_per_tok", "moe_topk"),
    *("moe_intermediate_size", "num_shared_expert"),
)
"""Fields that are a number, or a list of one for each layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(BiasedConfig):
    """The shape of one Hunyuan with experts."""

    routing: Routing
    expert_size: int
    shared_size: int


def _read(fields: dict[str, Any]) -> Config:
    fields |= {name: _of_all_layers(fields, name) for name in LISTS if fields.get(name) is not None}
    # transformers reads the usual name first, and num_local_experts before num_experts as `num_experts` does.
    per_token_name = "moe_topk" if fields.get("num_experts_per_tok") is None else "num_experts_per_tok"
    hf_config.require(fields, moe_layer_num_skipped=0, norm_topk_prob=True, routed_scaling_factor=1.0)
    size = hf_config.integer(fields, "intermediate_size")
    hunyuan_v1_dense.check(fields)
    return read_config(
        Config,
        fields,
        rope=hunyuan_v1_dense.rope(fields),
        routing=Routing(
            num_experts=hf_config.num_experts(fields, per_token_name=per_token_name),
            num_experts_per_token=hf_config.integer(fields, per_token_name),
            is_normalized=True,
        ),
        expert_size=hf_config.integer(fields, "moe_intermediate_size", size),
        shared_size=size * hf_config.integer(fields, "num_shared_expert", 1),
    )


def _of_all_layers(fields: dict[str, Any], name: str) -> Any:
    """Return a number that a list may repeat for each layer. Raises CheckpointError if layers differ."""
    value, num_layers = fields[name], hf_config.integer(fields, "num_hidden_layers")
    if not isinstance(value, list):
        return value
    if len(value) < num_layers or any(each != value[0] for each in value[:num_layers]):
        raise CheckpointError(f"config.json: {name} must be the same in all {num_layers} layers, got {value!r:.100}")
    return value[0]


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    experts = mixture.experts_of(config, config.shared_size)
    layer = replace(config.layer, mixer=hunyuan_v1_dense.attention(config), feed_forward=experts)
    return (layer,) * config.num_layers


NAMES = replace(hunyuan_v1_dense.NAMES, experts=ExpertNames(router="gate.wg", shared="shared_mlp"))
FAMILY = Family(
    Config,
    DEFAULTS,
    _read,
    old_names=hunyuan_v1_dense.OLD_NAMES,
    layers=layers,
    names=NAMES,
    doc=__doc__,
    features=("QK norm",),
)
