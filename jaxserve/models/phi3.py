"""Phi 3, 3.5 and 4 mini (Abdin et al. 2024, arXiv:2404.14219): Llama with fused checkpoints and LongRoPE.

The served context decides, for all requests, which of LongRoPE's two lists of factors is used: see `layers.rope`.
"""

from typing import Any

from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.names import Names
from jaxserve.layers.rope import Rope
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05
}  # fmt: skip


def _read(fields: dict[str, Any]) -> DecoderConfig:
    window = hf_config.optional_integer(fields, "sliding_window")
    return read_config(DecoderConfig, fields, sliding_window=window, rope=_rope(fields))


def _rope(fields: dict[str, Any]) -> Rope:
    """Read LongRoPE, which older checkpoints call by two more names; the original context is next to its parameters."""
    name = "original_max_position_embeddings"
    parameters = hf_rope.rope_parameters(fields) | {name: fields[name]}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = "longrope" if kind in ("su", "yarn") else kind
    changed = {"rope_parameters": parameters | {"rope_type": kind}, "rope_scaling": None}
    return hf_rope.rope(fields | changed, partial_rotary_factor=1.0)


NAMES = Names(qkv=("qkv_proj",), gate_up=("gate_up_proj",))
FAMILY = Family(DecoderConfig, DEFAULTS, _read, names=NAMES, doc=__doc__, features=("sliding_window",))
