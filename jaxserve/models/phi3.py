"""Phi 3, 3.5 and 4 mini (Abdin et al. 2024, arXiv:2404.14219): Llama with fused checkpoints and LongRoPE.

The served context decides, for all requests, which of LongRoPE's two lists of factors is used: see `layers.rope`.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import Layer
from jaxserve.layers.names import Names
from jaxserve.layers.rope import Rope
from jaxserve.models import hf_rope
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one Phi 3."""

    sliding_window: int | None


def _read(fields: dict[str, Any]) -> Config:
    return read_config(Config, fields, rope=_rope(fields))


def _rope(fields: dict[str, Any]) -> Rope:
    """Read LongRoPE, which older checkpoints call by two more names; the original context is next to its parameters."""
    name = "original_max_position_embeddings"
    parameters = hf_rope.rope_parameters(fields) | {name: fields[name]}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = "longrope" if kind in ("su", "yarn") else kind
    changed = {"rope_parameters": parameters | {"rope_type": kind}, "rope_scaling": None}
    return hf_rope.rope(fields | changed, partial_rotary_factor=1.0)


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = replace(config.attention, sliding_window=config.sliding_window)
    return (replace(config.layer, mixer=attention),) * config.num_layers


NAMES = Names(qkv=("qkv_proj",), gate_up=("gate_up_proj",))
FAMILY = Family(Config, DEFAULTS, _read, layers=layers, names=NAMES, doc=__doc__)
