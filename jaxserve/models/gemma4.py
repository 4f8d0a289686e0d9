"""Gemma 4, the text model (Gemma Team 2026, huggingface.co/google/gemma-4-E2B-it): heads whose number and size differ
between layers with a window and others, norms of values, and gains that are stored as they are. Small models have
embeddings for each layer, and last layers that read the keys and values of earlier ones; some have experts beside the
dense feed-forward.
"""

import dataclasses
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.errors import CheckpointError
from jaxserve.layers.attention import HeadNorm
from jaxserve.layers.batch import Batch
from jaxserve.layers.decoder import BiasedConfig
from jaxserve.layers.dense_and_experts import DenseAndExperts
from jaxserve.layers.embedding import embed, embedding_spec
from jaxserve.layers.layer import PRE_NORMS, SANDWICH_NORMS, Layer
from jaxserve.layers.layer_input import LayerInput
from jaxserve.layers.linear import linear
from jaxserve.layers.moe import Experts, Routing
from jaxserve.layers.names import SANDWICH_NAMES, ExpertNames, Names
from jaxserve.layers.params import Params, matrix_spec
from jaxserve.layers.rope import Rope
from jaxserve.models import gemma2, hf_config, hf_rope
from jaxserve.models.family import Family
from jaxserve.models.gemma import embed_tokens
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True, "sliding_window": 512, "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0
}  # fmt: skip

OVERRIDES = "overrides of layers"
"""The name of `per_layer_config`, which no other family reads, among the fields."""

ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
"""The rotary embeddings of a config that says nothing of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(BiasedConfig):
    """The shape of one Gemma 4; `num_kv_heads`, `head_dim` are those of layers with a window.

    Attributes:
        full_kv_heads, full_head_dim, rope: of layers without a window.
        sources: the layer whose keys and values each layer reads; None if it has its own.
        has_wide_mlp: feed-forwards of layers that read those of others are twice as wide.
        input_size: P, the size of a token's embedding for a layer; 0 if there are none.
        routing, expert_size: of the experts beside the dense feed-forward; None and 0 if there are none.
    """

    sliding_windows: tuple[int | None, ...]
    full_kv_heads: int
    full_head_dim: int
    keys_are_values: bool
    sources: tuple[int | None, ...]
    has_wide_mlp: bool
    input_size: int
    input_vocab_size: int
    logit_soft_cap: float | None
    local_rope: Rope
    routing: Routing | None
    expert_size: int


def _revise(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {"per_layer_config": None, OVERRIDES: fields.get("per_layer_config")}


def _read(fields: dict[str, Any]) -> Config:
    window = hf_config.integer(fields, "sliding_window")
    windows = (*hf_config.periodic_windows(fields, window, period=6)[:-1], None)  # the last attends to all
    keys_are_values = hf_config.flag(fields, "attention_k_eq_v")
    fields |= _full_heads(fields, fields.get(OVERRIDES), windows, keys_are_values=keys_are_values)
    full_heads = hf_config.num_kv_heads(fields | {"num_key_value_heads": fields["num_global_key_value_heads"]})
    sizes = hf_config.integer(fields, "global_head_dim"), hf_config.integer(fields, "head_dim")
    rope, local_rope = hf_rope.ropes_of_objects(fields, ROPES, sizes=sizes)
    has_experts = hf_config.flag(fields, "enable_moe_block")
    input_size = hf_config.integer(fields, "hidden_size_per_layer_input", minimum=0)
    input_vocab_size = hf_config.integer(fields, "vocab_size_per_layer_input")
    if input_size and input_vocab_size < hf_config.integer(fields, "vocab_size"):
        raise CheckpointError(f"config.json: vocab_size_per_layer_input ({input_vocab_size}) is less than vocab_size")
    return read_config(
        Config,
        fields,
        head_dim=hf_config.integer(fields, "head_dim"),
        activation=hf_config.activation(fields, "hidden_activation"),
        sliding_windows=windows,
        full_kv_heads=full_heads,
        full_head_dim=hf_config.integer(fields, "global_head_dim"),
        keys_are_values=keys_are_values,
        sources=hf_config.kv_sources(fields, windows),
        has_wide_mlp=hf_config.flag(fields, "use_double_wide_mlp"),
        input_size=input_size,
        input_vocab_size=input_vocab_size,
        logit_soft_cap=hf_config.optional_number(fields, "final_logit_softcapping"),
        rope=rope,
        local_rope=local_rope,
        routing=_routing(fields) if has_experts else None,
        expert_size=hf_config.integer(fields, "moe_intermediate_size") if has_experts else 0,
    )


def _full_heads(
    fields: dict[str, Any], overrides: Any, windows: tuple[int | None, ...], *, keys_are_values: bool
) -> dict[str, Any]:
    """Return `num_global_key_value_heads` and `global_head_dim`, as transformers 5 writes them: the fields of each
    layer without a window that differ from those of others, in `per_layer_config`.
    """
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    if overrides is None:
        given = fields.get("num_global_key_value_heads") if keys_are_values else None
        return {"num_global_key_value_heads": fields["num_key_value_heads"] if given is None else given}
    full = [layer for layer, window in enumerate(windows) if window is None]
    is_by_layer = isinstance(overrides, dict) and all(str(layer).isdecimal() for layer in overrides)
    by_layer = {int(layer): given for layer, given in overrides.items()} if is_by_layer else {}
    of_first = by_layer.get(full[0], {})
    is_known = is_by_layer and isinstance(of_first, dict) and of_first.keys() <= names.keys()
    if not is_known or by_layer != (dict.fromkeys(full, of_first) if of_first else {}):
        raise CheckpointError(
            "config.json: per_layer_config must have one head_dim and num_key_value_heads for the layers of "
            f"full_attention ({', '.join(map(str, full))}), got {overrides!r:.100}"
        )
    return {new: of_first.get(name, fields[name]) for name, new in names.items()}


def _routing(fields: dict[str, Any]) -> Routing:
    return Routing(
        num_experts=hf_config.num_experts(fields, per_token_name="top_k_experts"),
        num_experts_per_token=hf_config.integer(fields, "top_k_experts"),
        is_normalized=True,
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = replace(
        config.attention,
        scale=1.0,
        head_norm=HeadNorm(norm=config.norm),
        value_norm=replace(config.norm, has_gain=False),
    )
    local = replace(attention, rope=config.local_rope)
    full = replace(
        attention,
        num_kv_heads=config.full_kv_heads,
        head_dim=config.full_head_dim,
        keys_are_values=config.keys_are_values,
    )
    layer = replace(config.layer, norms=SANDWICH_NORMS, has_scalar=True)
    if config.input_size:
        block = LayerInput(size=config.input_size, activation=config.activation)
        layer = replace(layer, layer_input=block)

    def of_layer(window: int | None, source: int | None) -> Layer:
        mixer = full if window is None else replace(local, sliding_window=window)
        wide = 2 if config.has_wide_mlp and source is not None else 1
        dense = replace(config.feed_forward, size=wide * config.intermediate_size)
        own = replace(layer, mixer=replace(mixer, source=source), feed_forward=dense)
        if config.routing is None:
            return own
        experts = Experts(routing=config.routing, size=config.expert_size, activation=config.activation)
        norms = tuple(name for name in SANDWICH_NORMS if name != PRE_NORMS[1])  # each part has its own
        return replace(own, feed_forward=DenseAndExperts(dense=dense, experts=experts, norm=config.norm), norms=norms)

    return tuple(map(of_layer, config.sliding_windows, config.sources))


def names(config: Config) -> Names:
    """Return the names of modules; layers with experts hold the parts of the feed-forward themselves."""
    if config.routing is None:
        return SANDWICH_NAMES
    return replace(SANDWICH_NAMES, mlp="", experts=ExpertNames(router="router.proj"))


def amend(specs: Params, config: Any) -> Params:
    """Add the embeddings for each layer, if there are some. Gains of queries make up for scores that are not scaled:
    with random gains near 1, rounding to 16 bits would decide which tokens are attended to.
    """
    for layer in specs["layers"]:
        norm = layer["attention"]["q_norm"]
        layer["attention"]["q_norm"] = replace(norm, init_scale=norm.shape[0] ** -0.5)
    if not config.input_size:
        return specs
    L, P, E = config.num_layers, config.input_size, config.hidden_size
    table, projection, norm = (
        f"model.{name}"
        for name in ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
    )
    return specs | {
        "embed_per_layer": {
            "table": embedding_spec(table, vocab_size=config.input_vocab_size, hidden_size=L * P),
            "projection": matrix_spec(projection, (L, P, E), (None, None, "embed")),
            "norm": config.norm.specs(norm, P),
        }
    }


def layer_inputs(params: Params, config: Any, batch: Batch) -> Float[Array, "L T P"] | None:
    """Return the vectors of tokens for each layer: what a table says of a token, and what its embedding does. Tokens
    that the table does not have are token 0 to it.
    """
    if not config.input_size:
        return None
    known = batch
    if config.input_vocab_size < config.vocab_size:
        known = dataclasses.replace(
            batch, token_ids=jnp.where(batch.token_ids < config.input_vocab_size, batch.token_ids, 0)
        )
    own, L, P = params["embed_per_layer"], config.num_layers, config.input_size
    rows = embed(own["table"], known).reshape(-1, L, P) * P**0.5
    x = embed_tokens(params, config, batch)
    projected = linear(x, own["projection"], context=batch.context, name="layer inputs") * config.hidden_size**-0.5
    return jnp.swapaxes((config.norm(projected, own["norm"]) + rows) * 2**-0.5, 0, 1)


FAMILY = Family(
    Config,
    DEFAULTS,
    _read,
    revise=_revise,
    layers=layers,
    names=names,
    amend=amend,
    embed=embed_tokens,
    layer_inputs=layer_inputs,
    head=gemma2.head,
    doc=__doc__,
    features=("QK norm", "norms of values", "norms around blocks"),
)
