"""Mamba-2 and Mamba Codestral (Dao and Gu 2024, arXiv:2405.21060): layers with a state, and nothing else."""

import dataclasses
import math
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.layer import ONE_NORM, Layer
from jaxserve.layers.mamba import Mamba2
from jaxserve.layers.names import Names
from jaxserve.layers.norm import Norm
from jaxserve.loading.bounds import MAX_CONTEXT
from jaxserve.models import hf_config
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = {
    "num_heads": 128, "head_dim": 64, "vocab_size": 32768, "hidden_size": 4096, "state_size": 128,
    "num_hidden_layers": 64, "layer_norm_epsilon": 1e-05, "expand": 2, "conv_kernel": 4, "n_groups": 8,
    "use_conv_bias": True, "hidden_act": "silu"
}  # fmt: skip

HYBRID_DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 128000, "intermediate_size": 14336, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_conv_bias": True
}  # fmt: skip
"""Defaults of IBM's and TII's hybrids."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of one Mamba-2. Its states hold texts of any length."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    norm_eps: float
    tie_word_embeddings: bool
    mixer: Mamba2
    max_position_embeddings: int = MAX_CONTEXT


def _read(fields: dict[str, Any]) -> Config:
    config = read_config(
        Config,
        fields,
        norm_eps=hf_config.number(fields, "layer_norm_epsilon"),
        mixer=mixer(fields, OWN_NAMES, eps="layer_norm_epsilon"),
    )
    inner = hf_config.integer(fields, "expand") * config.hidden_size
    if inner != config.mixer.num_heads * config.mixer.head_size:
        raise CheckpointError(f"config.json: expand times hidden_size ({inner}) is not num_heads times head_dim")
    return config


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldNames:
    """The names of a block's fields, by default those of IBM's and TII's hybrids."""

    heads: str = "mamba_n_heads"
    groups: str = "mamba_n_groups"
    head_size: str = "mamba_d_head"
    state_size: str = "mamba_d_state"
    width: str = "mamba_d_conv"
    activation: str = "hidden_act"
    bias: str = "mamba_proj_bias"
    convolution_bias: str = "mamba_conv_bias"


OWN_NAMES = FieldNames(
    heads="num_heads",
    groups="n_groups",
    head_size="head_dim",
    state_size="state_size",
    width="conv_kernel",
    bias="use_bias",
    convolution_bias="use_conv_bias",
)


def mixer(fields: dict[str, Any], names: FieldNames, *, eps: str) -> Mamba2:
    """Read a block; `eps` is the name of the field of its norm. Raises CheckpointError for groups that do not divide
    the heads.
    """
    hf_config.quotient(fields, names.heads, names.groups)
    low, high = _limits(fields)
    return Mamba2(
        num_heads=hf_config.integer(fields, names.heads),
        num_groups=hf_config.integer(fields, names.groups),
        head_size=hf_config.integer(fields, names.head_size),
        state_size=hf_config.integer(fields, names.state_size),
        width=hf_config.integer(fields, names.width, minimum=2),
        activation=hf_config.activation(fields, names.activation),
        norm_eps=hf_config.number(fields, eps),
        min_step=low,
        max_step=high,
        has_bias=hf_config.flag(fields, names.bias),
        has_output_bias=hf_config.flag(fields, names.bias),
        has_convolution_bias=hf_config.flag(fields, names.convolution_bias),
    )


def hybrid_mixer(fields: dict[str, Any], *, inner: int | None = None) -> Mamba2:
    """Read a block of IBM's and TII's hybrids. Raises CheckpointError for heads that together are not `inner`, by
    default `mamba_expand` times hidden_size.
    """
    name = "mamba_d_ssm" if inner is not None else "mamba_expand times hidden_size"
    if inner is None:
        inner = hf_config.integer(fields, "mamba_expand") * hf_config.integer(fields, "hidden_size")
    num_heads = hf_config.integer(fields, "mamba_n_heads")
    if fields["mamba_d_head"] == "auto":
        fields = fields | {"mamba_d_head": inner // num_heads}
    if num_heads * hf_config.integer(fields, "mamba_d_head") != inner:
        raise CheckpointError(f"config.json: {name} ({inner}) is not mamba_n_heads ({num_heads}) times mamba_d_head")
    return mixer(fields, FieldNames(), eps="rms_norm_eps")


def _limits(fields: dict[str, Any]) -> tuple[float, float]:
    """Read the limits of step sizes; an infinite one may be written as transformers 5 does."""
    limits = fields.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    if isinstance(limits, list):
        limits = [math.inf if each == {"__float__": "Infinity"} else each for each in limits]
        are_numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in limits)
        if len(limits) == 2 and are_numbers and 0 <= limits[0] < limits[1]:
            return float(limits[0]), float(limits[1])
    raise CheckpointError(f"config.json: time_step_limit must be two numbers, the first smaller, got {limits!r:.100}")


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    layer = Layer(
        hidden_size=config.hidden_size,
        mixer=config.mixer,
        feed_forward=None,
        norm=Norm(eps=config.norm_eps),
        norms=ONE_NORM,
    )
    return (layer,) * config.num_layers


NAMES = Names(
    embed="backbone.embeddings",
    layers="backbone.layers",
    norm="backbone.norm_f",
    attention="mixer",
    attention_norm="norm",
)
FAMILY = Family(Config, DEFAULTS, _read, layers=layers, names=NAMES, doc=__doc__, features=("Mamba-2",))
