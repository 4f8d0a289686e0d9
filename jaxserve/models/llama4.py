"""Llama 4, the text model (Meta 2025, huggingface.co/meta-llama/Llama-4-Scout-17B-16E): most layers rotate and see
chunks of a text; the others see all of it without a rotation, by queries that grow with their position. Experts weigh
their inputs, and one is shared.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.attention import HeadNorm, QueryScale
from jaxserve.layers.decoder import BiasedConfig
from jaxserve.layers.layer import Layer
from jaxserve.layers.moe import Routing
from jaxserve.layers.names import ExpertNames, Names
from jaxserve.models import hf_config, hf_rope, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "num_experts_per_tok": 1, "num_local_experts": 16,
    "interleave_moe_layer_step": 1, "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192,
    "attn_scale": 0.1
}  # fmt: skip

CHUNKED = "chunked_attention"
"""The kind of layers that see chunks of a text in `layer_types`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(BiasedConfig):
    """The shape of one Llama 4; `intermediate_size` is that of layers without experts.

    Attributes:
        rotates, chunk_sizes, sparse_layers: whether each layer rotates, the chunks it sees, whether it has experts.
        has_head_norm: queries and keys of layers that rotate are normalised.
        query_scale: of layers that do not.
        expert_size: inner size of an expert, and of the shared one.
    """

    rotates: tuple[bool, ...]
    chunk_sizes: tuple[int | None, ...]
    sparse_layers: tuple[bool, ...]
    has_head_norm: bool
    query_scale: QueryScale | None
    expert_size: int
    routing: Routing


def _read(fields: dict[str, Any]) -> Config:
    rotates = hf_config.rotating_layers(fields | {"no_rope_layers": fields.get("no_rope_layers") or None})
    chunk_size = hf_config.optional_integer(fields, "attention_chunk_size")
    kinds = [CHUNKED if rotated and chunk_size is not None else "full_attention" for rotated in rotates]
    chunk_sizes = hf_config.windows_by_type(fields, chunk_size, kinds, kind=CHUNKED, name="attention_chunk_size")
    name = "attn_temperature_tuning"
    has_scale = fields.get(name) == 4 or hf_config.flag(fields, name, True)  # which the first releases have
    scale = QueryScale(
        beta=hf_config.number(fields, "attn_scale"), original_context=hf_config.integer(fields, "floor_scale"), offset=1
    )
    return read_config(
        Config,
        fields,
        intermediate_size=hf_config.integer(fields, "intermediate_size_mlp"),
        rotates=rotates,
        chunk_sizes=chunk_sizes,
        sparse_layers=_sparse_layers(fields),
        has_head_norm=hf_config.flag(fields, "use_qk_norm", True),
        query_scale=scale if has_scale else None,
        expert_size=hf_config.integer(fields, "intermediate_size"),
        routing=mixture.read_routing(fields, scores="sigmoid", is_normalized=False),
        rope=hf_rope.rope(fields, theta=500_000.0),
    )


def _sparse_layers(fields: dict[str, Any]) -> tuple[bool, ...]:
    """Return which layers have experts: those in `moe_layers`, or every one of number `interleave_moe_layer_step`."""
    num_layers, sparse = hf_config.integer(fields, "num_hidden_layers"), fields.get("moe_layers")
    if sparse is None:
        step = hf_config.integer(fields, "interleave_moe_layer_step")
        return tuple((index + 1) % step == 0 for index in range(num_layers))
    if not isinstance(sparse, list) or not all(isinstance(index, int) for index in sparse):
        raise CheckpointError(f"config.json: moe_layers must be a list of integers, got {sparse!r:.100}")
    return tuple(index in sparse for index in range(num_layers))


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    norm = HeadNorm(norm=replace(config.norm, has_gain=False), is_after_rotation=True)
    rotating = replace(config.attention, head_norm=norm if config.has_head_norm else None)
    unrotated = replace(config.attention, rope=None, query_scale=config.query_scale)
    experts = mixture.experts_of(config, config.expert_size, weighs_inputs=True)
    return tuple(
        replace(
            config.layer,
            mixer=replace(rotating if rotates else unrotated, chunk_size=chunk_size),
            feed_forward=experts if is_sparse else config.feed_forward,
        )
        for rotates, chunk_size, is_sparse in zip(config.rotates, config.chunk_sizes, config.sparse_layers, strict=True)
    )


NAMES = Names(is_interleaved=True, mlp="feed_forward", experts=ExpertNames(router="router"))
FAMILY = Family(
    Config,
    DEFAULTS,
    _read,
    layers=layers,
    names=NAMES,
    doc=__doc__,
    features=("QK norm", "chunked attention", "query scale by position"),
)
