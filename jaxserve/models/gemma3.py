"""Gemma 3, the text model (Gemma Team 2025, arXiv:2503.19786): Gemma 2 with norms on q and k instead of caps.

Layers with a window rotate with a base of their own.
"""

import dataclasses
from typing import Any

from jaxserve.layers.decoder import WindowedConfig
from jaxserve.layers.layer import SANDWICH_NORMS
from jaxserve.layers.names import SANDWICH_NAMES
from jaxserve.layers.rope import Rope
from jaxserve.models import gemma2, hf_config, hf_rope
from jaxserve.models.family import Family
from jaxserve.models.gemma import embed_tokens
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = gemma2.DEFAULTS | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(WindowedConfig):
    """The shape of one Gemma 3."""

    logit_soft_cap: float | None


def _read(fields: dict[str, Any]) -> Config:
    hf_config.require(fields, attn_logit_softcapping=None)
    head_dim = hf_config.integer(fields, "head_dim")
    window = hf_config.integer(fields, "sliding_window")
    period = hf_config.integer(fields, "sliding_window_pattern", 6)
    rope, local_rope = ropes(fields, head_dim)
    return read_config(
        Config,
        fields,
        **hf_config.biases(fields),
        head_dim=head_dim,
        activation=hf_config.activation(fields, "hidden_activation"),
        sliding_windows=hf_config.periodic_windows(fields, window, period=period),
        logit_soft_cap=hf_config.optional_number(fields, "final_logit_softcapping"),
        score_scale=hf_config.number(fields, "query_pre_attn_scalar") ** -0.5,
        norm_offset=1.0,
        norms=SANDWICH_NORMS,
        head_norm="shared",
        rope=rope,
        local_rope=local_rope,
    )


def ropes(fields: dict[str, Any], size: int) -> tuple[Rope, Rope]:
    """Read the rotary embedding of full layers, and of those with a window, for heads of this size."""
    local_theta = fields.get("rope_local_base_freq")
    return hf_rope.ropes_by_type(
        fields, size=size, theta=1_000_000.0, local_theta=local_theta, is_context_stretched=True
    )


FAMILY = Family(
    Config,
    DEFAULTS,
    _read,
    names=SANDWICH_NAMES,
    embed=embed_tokens,
    head=gemma2.head,
    doc=__doc__,
    features=("QK norm", "norms around blocks", "local_rope"),
)
