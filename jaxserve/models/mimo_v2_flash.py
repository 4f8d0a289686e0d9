"""MiMo V2 Flash (Xiaomi 2026, arXiv:2601.02780): values smaller than keys, partial rotation, and experts; layers with a
window have sinks, another rotation and more KV heads.

The layers that predict further tokens (`model.mtp.`) are not loaded.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.attention import Attention
from jaxserve.layers.layer import Layer
from jaxserve.layers.names import Names
from jaxserve.models import deepseek_v3, hf_config, hf_rope, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 152576, "intermediate_size": 16384, "num_hidden_layers": 48, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05, "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "num_experts": 256,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "sliding_window": 129,
    "attention_value_scale": 0.707
}  # fmt: skip

THETAS = {"rope_theta": 5_000_000.0, "swa_rope_theta": 10_000.0}
FRACTION = 0.334
ROPES: dict[str, Any] = {
    "full_attention": {"rope_theta": THETAS["rope_theta"]},
    "sliding_attention": {"rope_theta": THETAS["swa_rope_theta"]},
}
"""The rotary embeddings of a config that says nothing of them, or says it as the first releases."""

SUPPORTED = {
    "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "n_shared_experts": 0,
    "use_qk_norm": False, "rope_scaling": None
}  # fmt: skip
"""Fields of published configs, and the only value of each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(mixture.Config):
    """The shape of one MiMo V2 Flash; `intermediate_size` is that of layers without experts.

    Attributes:
        local_kv_heads: of layers with a window.
        value_dim, value_scale: the size of a head's values, and their factor.
    """

    local_kv_heads: int
    value_dim: int
    value_scale: float


def _read(fields: dict[str, Any]) -> Config:
    names = ("num_attention_heads", "head_dim", "v_head_dim")
    num_layers, _, size, value_dim = (hf_config.integer(fields, name) for name in ("num_hidden_layers", *names))
    supported = SUPPORTED | {f"swa_{name}": fields[name] for name in names}
    hf_config.require(fields, **supported, **(THETAS if fields.get("rope_parameters") is None else {}))
    if value_dim > size:
        raise CheckpointError(f"config.json: v_head_dim ({value_dim}) is more than head_dim ({size})")
    if fields.get("sliding_window_size") is not None:  # those before a token
        fields["sliding_window"] = hf_config.integer(fields, "sliding_window_size") + 1
    fields |= _kinds(fields, "hybrid_layer_pattern", "layer_types", ("full_attention", "sliding_attention"))
    fields |= _kinds(fields, "moe_layer_freq", "mlp_layer_types", ("dense", "sparse"))
    is_full = [index == 0 or (index + 1) % 6 == 0 for index in range(num_layers)]
    kinds = ["full_attention" if full else "sliding_attention" for full in is_full]
    local_kv_heads = hf_config.integer(
        fields, "swa_num_key_value_heads", 2 * hf_config.integer(fields, "num_key_value_heads")
    )
    rope, local_rope = hf_rope.ropes_of_objects(fields, ROPES, sizes=(size, size), partial_rotary_factor=FRACTION)
    return read_config(
        Config,
        fields,
        qkv_bias=hf_config.flag(fields, "attention_bias"),
        sliding_windows=hf_config.windows_by_type(fields, hf_config.optional_integer(fields, "sliding_window"), kinds),
        sparse_layers=hf_config.sparse_layers_by_type(fields | {"first_k_dense_replace": None}),
        routing=deepseek_v3.routing(fields),
        has_selection_bias=True,
        rope=rope,
        local_rope=local_rope,
        local_kv_heads=hf_config.num_kv_heads(fields | {"num_key_value_heads": local_kv_heads}),
        value_dim=value_dim,
        value_scale=hf_config.number(fields, "attention_value_scale", 1.0),
    )


def _kinds(fields: dict[str, Any], old: str, name: str, kinds: tuple[str, str]) -> dict[str, Any]:
    """Return the kinds of layers that the first releases have as 0 and 1 in the field `old`."""
    flags = fields.get(old)
    if fields.get(name) is not None or not isinstance(flags, list):
        return {}
    if any(flag not in (0, 1) for flag in flags):
        raise CheckpointError(f"config.json: {old} must have 0 or 1 for each layer, got {flags!r:.100}")
    return {name: [kinds[flag] for flag in flags]}


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    value_dim = None if config.value_dim == config.head_dim else config.value_dim
    values = {"value_dim": value_dim, "value_scale": config.value_scale}
    local = values | {"num_kv_heads": config.local_kv_heads, "has_sinks": True}

    def of_kind(layer: Layer) -> Layer:
        assert isinstance(layer.mixer, Attention)
        return replace(layer, mixer=replace(layer.mixer, **(values if layer.mixer.sliding_window is None else local)))

    return tuple(map(of_kind, mixture.layers(config)))


FAMILY = Family(
    Config,
    DEFAULTS,
    _read,
    old_names={"layernorm_epsilon": "rms_norm_eps"},
    layers=layers,
    names=Names(sinks="attention_sink_bias"),
    doc=__doc__,
    features=("sinks", "values smaller than keys", "local_rope"),
)
