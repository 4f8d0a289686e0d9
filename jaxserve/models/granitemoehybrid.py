"""Granite 4 (Granite Team 2025, github.com/ibm-granite/granite-4.0-language-models): Granite's multipliers, Mamba-2 and
layers that attend, usually without positions; with experts beside a shared one, or dense.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.layer import Layer
from jaxserve.layers.mamba import Mamba2
from jaxserve.layers.moe import Experts, Routing
from jaxserve.layers.names import Names
from jaxserve.models import granite, granitemoe, hf_config, hf_rope, mamba2, mixture

DEFAULTS: dict[str, Any] = (
    mamba2.HYBRID_DEFAULTS
    | granite.DEFAULTS
    | {"num_key_value_heads": None, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024}
)

MAMBA, ATTENTION = "linear_attention", "full_attention"
"""The kinds of layers in `layer_types`."""
OLD_KINDS = {"mamba": MAMBA, "attention": ATTENTION}
"""Names of kinds before transformers 5."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(granite.Config):
    """The shape of one Granite 4; `intermediate_size` is that of one expert."""

    attends: tuple[bool, ...]
    mamba: Mamba2
    shared_size: int
    routing: Routing | None


def _read(fields: dict[str, Any]) -> Config:
    hf_config.require(fields, mlp_bias=False)
    if fields.get("position_embedding_type") not in (None, "nope", "rope"):
        raise CheckpointError(
            f"config.json: unknown position_embedding_type {fields['position_embedding_type']!r:.100}; known are "
            "nope and rope"
        )
    kinds = fields.get("layer_types")
    if isinstance(kinds, list):
        fields["layer_types"] = [OLD_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    default = (MAMBA,) * hf_config.integer(fields, "num_hidden_layers")
    kinds = hf_config.layer_kinds(fields, (MAMBA, ATTENTION), default)
    has_experts = hf_config.integer(fields, "num_local_experts", minimum=0) > 0
    rope = hf_rope.rope(fields)
    return granite.read(
        Config,
        fields,
        rope=rope if fields.get("position_embedding_type") == "rope" else None,
        attends=tuple(kind == ATTENTION for kind in kinds),
        mamba=mamba2.hybrid_mixer(fields),
        shared_size=hf_config.integer(fields, "shared_intermediate_size"),
        routing=mixture.read_routing(fields, scores="softmax_of_chosen", is_normalized=False) if has_experts else None,
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    feed_forward = replace(config.feed_forward, size=config.shared_size)
    if config.routing is not None:
        feed_forward = Experts(
            routing=config.routing, size=config.intermediate_size, activation=config.activation, shared=feed_forward
        )
    attending = replace(config.layer, feed_forward=feed_forward)
    recurrent = replace(attending, mixer=config.mamba, mixer_name="mamba")
    return tuple(attending if attends else recurrent for attends in config.attends)


def names(config: Config) -> Names:
    """Return the names of modules."""
    if config.routing is None:
        return Names(mlp="shared_mlp", gate_up=("input_linear",), down="output_linear")
    return granitemoe.NAMES


FAMILY = replace(
    granite.FAMILY,
    Config=Config,
    defaults=DEFAULTS,
    read=_read,
    aliases={"layers_block_type": "layer_types"},
    layers=layers,
    names=names,
    doc=__doc__,
    features=("Mamba-2",),
)
