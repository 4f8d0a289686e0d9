"""GPT-OSS (OpenAI 2025, arXiv:2508.10925): experts with a clamped SwiGLU, and attention heads with sinks.

Every other layer has a sliding window. A sink is a logit per head that takes part in its softmax without a value.
Experts stored as MXFP4 are converted by `loading.mxfp4` into the tensors declared here.
"""

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.layers.activations import ClampedSwiGLU
from jaxserve.layers.decoder import WindowedConfig
from jaxserve.layers.layer import Layer
from jaxserve.layers.moe import Experts, Routing, router_spec
from jaxserve.layers.names import LLAMA_NAMES
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.loading.bounds import MAX_WIDTH
from jaxserve.models import hf_config, hf_rope, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096
}  # fmt: skip
"""Scaling of rotary positions if config.json has none."""

DEFAULTS: dict[str, Any] = {
    "num_hidden_layers": 36, "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "num_experts_per_tok": 4, "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0, "attention_bias": True, "num_experts": 128
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(WindowedConfig):
    """The shape of one GPT-OSS; `intermediate_size` is that of one expert."""

    swiglu_alpha: float
    swiglu_limit: float
    routing: Routing


def _read(fields: dict[str, Any]) -> Config:
    hf_config.require(fields, hidden_act="silu")
    width = hf_config.integer(fields, "intermediate_size")
    if width > MAX_WIDTH:  # the order of its rows is listed explicitly
        raise CheckpointError(f"config.json: intermediate_size must be at most {MAX_WIDTH}, got {width}")
    window = hf_config.optional_integer(fields, "sliding_window")
    says_nothing = not (fields.get("rope_parameters") or fields.get("rope_scaling"))
    positions = {"rope_parameters": YARN} if says_nothing else {}
    return read_config(
        Config,
        fields,
        **hf_config.biases(fields),
        sliding_windows=hf_config.periodic_windows(fields, window, period=2),
        routing=mixture.read_routing(fields, scores="softmax_of_chosen", is_normalized=False),
        rope=hf_rope.rope(fields | positions, theta=150_000.0),
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = replace(config.attention, has_sinks=True)
    gate = ClampedSwiGLU(alpha=config.swiglu_alpha, limit=config.swiglu_limit)
    experts = Experts(routing=config.routing, size=config.intermediate_size, activation=gate)
    return config.windowed(replace(config.layer, mixer=attention, feed_forward=experts))


def amend(specs: Params, config: Config) -> Params:
    """Declare the experts as they are stored: all in one tensor, as [inputs, outputs], with biases."""
    for index, layer in enumerate(specs["layers"]):
        layer["mlp"] = _moe_specs(f"{LLAMA_NAMES.layers}.{index}.{LLAMA_NAMES.mlp}", config)
    return specs


def _moe_specs(prefix: str, config: Config) -> Params:
    """Declare the weights of `Experts.specs` from tensors that hold all experts as [inputs, outputs], gate and up
    interleaved.
    """
    X, E, F = config.routing.num_experts, config.hidden_size, config.intermediate_size
    gate_up_rows = np.arange(X * F * 2, dtype=np.int32).reshape(X, F, 2).transpose(0, 2, 1).ravel()
    matrix: dict[str, Any] = {"num_inputs": 1, "is_transposed": True, "quantize": True}
    bias: dict[str, Any] = {"init_scale": 0.0}

    def of_experts(
        name: str, shape: tuple[int, ...], *axes: str | None, stored: tuple[int, ...], **options: Any
    ) -> ParamSpec:
        source = (f"{prefix}.experts.{name}",)
        return ParamSpec(
            shape=shape, axes=("experts", *axes), source=source, source_shapes=(stored,), expert_size=F, **options
        )

    gate_up = (None, "expert_ffn", "embed")
    return {
        "router": router_spec(f"{prefix}.router", num_experts=X, hidden_size=E),
        "router_bias": ParamSpec(shape=(X,), axes=(None,), source=(f"{prefix}.router.bias",), init_scale=0.0),
        "experts": {
            "gate_up": of_experts(
                "gate_up_proj", (X, 2, F, E), *gate_up, stored=(X, E, 2 * F), rows=gate_up_rows, **matrix
            ),
            "gate_up_bias": of_experts(
                "gate_up_proj_bias", (X, 2, F), *gate_up[:2], stored=(X, 2 * F), rows=gate_up_rows, **bias
            ),
            "down": of_experts("down_proj", (X, E, F), "embed", "expert_ffn", stored=(X, F, E), **matrix),
            "down_bias": of_experts("down_proj_bias", (X, E), "embed", stored=(X, E), **bias),
        },
    }


FAMILY = Family(Config, DEFAULTS, _read, layers=layers, amend=amend, doc=__doc__, features=("sinks",))
