"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118): norms before and after each block, capped scores, alternating
windows.
"""

import dataclasses
from typing import Any

from jaxtyping import Array, Float

from jaxserve.layers.context import StepContext
from jaxserve.layers.decoder import WindowedConfig
from jaxserve.layers.embedding import soft_cap
from jaxserve.layers.layer import SANDWICH_NORMS
from jaxserve.layers.names import SANDWICH_NAMES
from jaxserve.layers.params import Params
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family, logits
from jaxserve.models.gemma import embed_tokens
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-06, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(WindowedConfig):
    """The shape of one Gemma 2."""

    logit_soft_cap: float | None


def read(fields: dict[str, Any], *, norms: tuple[str, ...] = SANDWICH_NORMS) -> Config:
    """Read the Config of a Gemma 2, or of a relative with other `norms`."""
    head_dim = hf_config.integer(fields, "head_dim")
    window = hf_config.integer(fields, "sliding_window")
    return read_config(
        Config,
        fields,
        **hf_config.biases(fields),
        head_dim=head_dim,
        activation=hf_config.activation(fields, "hidden_activation"),
        sliding_windows=hf_config.periodic_windows(fields, window, period=2),
        attention_soft_cap=hf_config.optional_number(fields, "attn_logit_softcapping"),
        logit_soft_cap=hf_config.optional_number(fields, "final_logit_softcapping"),
        score_scale=hf_config.number(fields, "query_pre_attn_scalar") ** -0.5,
        norm_offset=1.0,
        norms=norms,
        rope=hf_rope.rope(fields, size=head_dim),
    )


def head(params: Params, config: Any, hidden: Float[Array, "N E"], context: StepContext) -> Float[Array, "N V"]:
    """Return logits in float32, bent to stay within the cap if there is one."""
    return soft_cap(logits(params, config, hidden, context), config.logit_soft_cap)


FAMILY = Family(
    Config,
    DEFAULTS,
    read,
    names=SANDWICH_NAMES,
    embed=embed_tokens,
    head=head,
    doc=__doc__,
    features=("norms around blocks", "attention cap"),
)
