"""Laguna XS and M (Poolside 2026, huggingface.co/poolside/Laguna-XS.2): gated attention with a number of query heads by
layer, windows and two rotations, and experts chosen by sigmoid scores and a bias.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.attention import Attention, OutputGate
from jaxserve.layers.layer import Layer
from jaxserve.layers.moe import Experts
from jaxserve.layers.names import ExpertNames, Names
from jaxserve.models import hf_config, hf_rope, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
    "sliding_window": 512, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8, "num_experts": 256, "gating": True, "moe_routed_scaling_factor": 1.0,
    "moe_router_logit_softcapping": 0.0
}  # fmt: skip

ROPES: dict[str, Any] = {
    "full_attention": {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 10_000.0},
}
"""The rotary embeddings of a config that says nothing of them."""

SUPPORTED = {
    "decoder_sparse_step": 1, "norm_topk_prob": True, "moe_apply_router_weight_on_input": False, "qkv_bias": False,
    "swa_attention_sink_enabled": False, "rope_scaling": None
}  # fmt: skip
"""Fields of published configs, and the only value of each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(mixture.Config):
    """The shape of one Laguna; `intermediate_size` is that of layers without experts.

    Attributes:
        heads_by_layer: each layer's number of query heads.
        router_cap: bound of the router's logits, None if there is none.
    """

    heads_by_layer: tuple[int, ...]
    router_cap: float | None


def _read(fields: dict[str, Any]) -> Config:
    hf_config.require(fields, **SUPPORTED)
    num_layers, size = hf_config.integer(fields, "num_hidden_layers"), hf_config.head_dim(fields)
    sparse_layers = hf_config.sparse_layers_by_type(fields | {"first_k_dense_replace": None})
    hf_config.require(fields, mlp_only_layers=[index for index, sparse in enumerate(sparse_layers) if not sparse])
    rope, local_rope = hf_rope.ropes_of_objects(fields, ROPES, sizes=(size, size), partial_rotary_factor=1.0)
    window, cap = hf_config.optional_integer(fields, "sliding_window"), "moe_router_logit_softcapping"
    return read_config(
        Config,
        fields,
        **hf_config.biases(fields),
        sliding_windows=hf_config.windows_by_type(fields, window, ["full_attention"] * num_layers),
        sparse_layers=sparse_layers,
        head_norm="shared",
        gate=_gate(fields),
        shared_expert_size=hf_config.integer(fields, "shared_expert_intermediate_size"),
        routing=mixture.read_routing(
            fields, scores="sigmoid", is_normalized=True, scale=hf_config.number(fields, "moe_routed_scaling_factor")
        ),
        has_selection_bias=True,
        rope=rope,
        local_rope=local_rope,
        heads_by_layer=_heads_by_layer(fields, num_layers),
        router_cap=hf_config.number(fields, cap) if fields[cap] else None,
    )


def _gate(fields: dict[str, Any]) -> OutputGate:
    """Return the gate; a config may say its kind for each layer, too."""
    given = fields["gating"]
    if given not in (True, "per-head", "per-element"):
        raise CheckpointError(f"config.json: gating must be true, 'per-head' or 'per-element', got {given!r:.100}")
    kind = "per-element" if given == "per-element" else "per-head"
    types = fields.get("gating_types")
    if types is not None and (not isinstance(types, list) or set(map(str, types)) != {kind}):
        raise CheckpointError(f"config.json: gating_types must be {kind!r} in all layers, got {types!r:.100}")
    return OutputGate(activation="softplus", is_per_head=kind == "per-head")


def _heads_by_layer(fields: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    name = "num_attention_heads_per_layer"
    counts = fields.get(name)
    counts = [fields["num_attention_heads"]] * num_layers if counts is None else counts
    if not isinstance(counts, list) or len(counts) != num_layers:
        raise CheckpointError(f"config.json: {name} must have a number for each of {num_layers} layers")
    for count in counts:
        hf_config.integer({name: count}, name)
        hf_config.num_kv_heads(fields | {"num_attention_heads": count})
    return tuple(counts)


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""

    def of_layer(layer: Layer, num_heads: int) -> Layer:
        assert isinstance(layer.mixer, Attention)
        layer = replace(layer, mixer=replace(layer.mixer, num_heads=num_heads))
        if not isinstance(layer.feed_forward, Experts):
            return layer
        return replace(layer, feed_forward=replace(layer.feed_forward, router_cap=config.router_cap))

    return tuple(map(of_layer, mixture.layers(config), config.heads_by_layer))


NAMES = Names(gate="g_proj", experts=ExpertNames(selection_bias="experts.e_score_correction_bias"))
FAMILY = Family(
    Config,
    DEFAULTS,
    _read,
    layers=layers,
    names=NAMES,
    doc=__doc__,
    features=("QK norm", "gated attention", "local_rope"),
)
