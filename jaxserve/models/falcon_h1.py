"""Falcon-H1 (Zuo et al. 2025, arXiv:2507.22448): attention and Mamba-2 side by side in each layer, with a multiplier of
nearly everything.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.activations import ScaledGate
from jaxserve.layers.layer import Layer
from jaxserve.layers.mamba import Mamba2
from jaxserve.layers.parallel import Parallel
from jaxserve.models import bamba, granite, hf_config, mamba2
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = mamba2.HYBRID_DEFAULTS | {
    "max_position_embeddings": 8192, "mamba_d_ssm": 1024, "mamba_norm_before_gate": True, "mamba_rms_norm": False,
    "lm_head_multiplier": 1.0, "embedding_multiplier": 1.0, "mlp_multipliers": [1.0, 1.0], "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0, "ssm_multipliers": [1.0] * 5,
    "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(granite.Config):
    """The shape of one Falcon-H1. Multipliers of keys, of the feed-forward's output and of logits are Granite's.

    Attributes:
        input_scales, output_scales: as in `Parallel`; the layer multiplies the latter by `update_scale`.
        gate_multiplier: of the feed-forward's gate.
    """

    mamba: Mamba2
    input_scales: tuple[float, float]
    output_scales: tuple[float, float]
    gate_multiplier: float


def _read(fields: dict[str, Any]) -> Config:
    kinds = ["hybrid"] * hf_config.integer(fields, "num_hidden_layers")
    hf_config.require(fields, mamba_use_mlp=True, layer_types=kinds, layers_block_type=kinds)

    def multiplier(name: str) -> float:
        return hf_config.number(fields, f"{name}_multiplier")

    of_gate, of_down = hf_config.numbers(fields, "mlp_multipliers", 2)
    return read_config(
        Config,
        fields,
        score_scale=hf_config.head_dim(fields) ** -0.5 * multiplier("key"),
        update_scale=of_down,
        logits_scaling=1 / multiplier("lm_head"),
        mamba=_mamba(fields),
        input_scales=(multiplier("attention_in"), multiplier("ssm_in")),
        # A layer multiplies the updates of both of its blocks by `of_down`, which is for the second.
        output_scales=(multiplier("attention_out") / of_down, multiplier("ssm_out") / of_down),
        gate_multiplier=of_gate,
    )


def _mamba(fields: dict[str, Any]) -> Mamba2:
    block = mamba2.hybrid_mixer(fields, inner=hf_config.optional_integer(fields, "mamba_d_ssm"))
    return replace(
        block,
        norm_eps=block.norm_eps if hf_config.flag(fields, "mamba_rms_norm") else None,
        norms_before_gate=hf_config.flag(fields, "mamba_norm_before_gate"),
        has_output_bias=hf_config.flag(fields, "projectors_bias"),
        multipliers=hf_config.numbers(fields, "ssm_multipliers", 5),
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    mixer = Parallel(
        attention=config.attention,
        recurrent=config.mamba,
        recurrent_name="mamba",
        input_scales=config.input_scales,
        output_scales=config.output_scales,
    )
    gate = ScaledGate(activation=config.activation, scale=config.gate_multiplier)
    feed_forward = replace(config.feed_forward, activation=gate)
    return (replace(config.layer, mixer=mixer, mixer_name="", feed_forward=feed_forward),) * config.num_layers


FAMILY = replace(
    granite.FAMILY,
    Config=Config,
    defaults=DEFAULTS,
    read=_read,
    layers=layers,
    names=bamba.NAMES,
    doc=__doc__,
    features=("Mamba-2",),
)
