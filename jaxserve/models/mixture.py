"""Decoders with grouped query heads and experts in some layers: what the configs of these families have in common, and
the layers that follow from it.
"""

import dataclasses
from dataclasses import replace
from typing import Any, Literal

from jaxserve.layers.attention import OutputGate
from jaxserve.layers.decoder import WindowedConfig
from jaxserve.layers.layer import Layer
from jaxserve.layers.moe import Experts, Routing
from jaxserve.models import hf_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(WindowedConfig):
    """The shape of a decoder with experts; `intermediate_size` is that of layers without.

    Attributes:
        sparse_layers: whether each layer has experts.
        expert_size: inner size of one expert.
        shared_expert_size: inner size of all shared experts of a layer together; 0 if there are none.
        gate: the gate of the attention's output; None if there is none.
        mlp_bias: biases in layers without experts and in the shared expert.
    """

    routing: Routing
    expert_size: int
    sparse_layers: tuple[bool, ...]
    gate: OutputGate | None = None
    shared_expert_size: int = 0
    has_shared_gate: bool = False
    has_selection_bias: bool = False


def shared_size(fields: dict[str, Any], name: str, default: int | None = None, *, minimum: int = 1) -> int:
    """Return the inner size of all shared experts of a layer together, if each is as large as another expert; `name` is
    the field with their number.
    """
    number = hf_config.integer(fields, name, default, minimum=minimum)
    return hf_config.integer(fields, "moe_intermediate_size") * number


def read_routing(
    fields: dict[str, Any],
    *,
    scores: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax",
    is_normalized: bool | None = None,
    scale: float = 1.0,
) -> Routing:
    """Read the number of experts, and of those of a token. `is_normalized` is by default the field's,
    `norm_topk_prob`.
    """
    return Routing(
        num_experts=hf_config.num_experts(fields),
        num_experts_per_token=hf_config.integer(fields, "num_experts_per_tok"),
        scores=scores,
        is_normalized=hf_config.flag(fields, "norm_topk_prob") if is_normalized is None else is_normalized,
        scale=scale,
    )


def experts_of(config: Any, shared_size: int = 0, **own: Any) -> Experts:
    """Return the experts of layers of a config with `routing`, `expert_size`, `activation` and `feed_forward`, beside a
    shared one of `shared_size` unless that is 0. `own` are further fields of Experts.
    """
    shared = replace(config.feed_forward, size=shared_size) if shared_size else None
    return Experts(routing=config.routing, size=config.expert_size, activation=config.activation, shared=shared, **own)


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    own = {"has_selection_bias": config.has_selection_bias, "has_shared_gate": config.has_shared_gate}
    experts = experts_of(config, config.shared_expert_size, **own)
    dense = config.windowed(replace(config.layer, mixer=replace(config.attention, gate=config.gate)))
    return tuple(
        replace(layer, feed_forward=experts) if is_sparse else layer
        for layer, is_sparse in zip(dense, config.sparse_layers, strict=True)
    )
