"""Baichuan 1 and 2 (Yang et al. 2023, arXiv:2309.10305): Llama in 7B, with ALiBi instead of rotations in 13B."""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.alibi import alibi_slopes
from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.names import Names
from jaxserve.layers.params import Params
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-06}
"""Defaults of this family's config in its own code, for fields that a config.json omits. Sizes have no defaults: those
of 7B and 13B differ.
"""

HAS_ROPE = {4096: True, 5120: False}
"""Presence of a rotary embedding by `hidden_size`. In other sizes the field of the context says it."""
HAS_UNIT_HEAD = {64000: False, 125696: True}
"""Normalisation of the LM head's rows by `vocab_size`: of Baichuan 1, and of 2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one Baichuan."""

    has_unit_head: bool


def _read(fields: dict[str, Any]) -> Config:
    # Its own code does not read these.
    hf_config.require(fields, num_key_value_heads=None, rope_scaling=None, rope_parameters=None)
    has_unit_head, has_rope = _has_unit_head(fields), _has_rope(fields)
    return read_config(
        Config,
        fields,
        has_unit_head=has_unit_head,
        rope=hf_rope.rope(fields) if has_rope else None,
        alibi_slopes=None if has_rope else alibi_slopes(hf_config.integer(fields, "num_attention_heads")),
    )


def _has_rope(fields: dict[str, Any]) -> bool:
    """Return true for the code of 7B, whose context is `max_position_embeddings`; in 13B it is `model_max_length`."""
    return HAS_ROPE.get(hf_config.integer(fields, "hidden_size"), "model_max_length" not in fields)


def _has_unit_head(fields: dict[str, Any]) -> bool:
    """Return true for Baichuan 2, which no field of its own tells; `norm_head` may say so, as in Ling."""
    vocab_size = hf_config.integer(fields, "vocab_size")
    if fields.get("norm_head") is None and vocab_size not in HAS_UNIT_HEAD:
        raise CheckpointError(
            f"config.json: vocab_size {vocab_size} is neither that of Baichuan 1 (64000) nor of 2 (125696); norm_head "
            "must say if the rows of the LM head are normalised, as in Baichuan 2"
        )
    return hf_config.flag(fields, "norm_head", HAS_UNIT_HEAD.get(vocab_size, False))


def amend(specs: Params, config: Config) -> Params:
    """Divide the rows of the LM head by their lengths."""
    if not config.has_unit_head:
        return specs
    if config.tie_word_embeddings:
        raise CheckpointError("config.json: tie_word_embeddings is not supported with a normalised LM head")
    return specs | {"lm_head": replace(specs["lm_head"], unit_axis=1, is_absorbed=True)}


FAMILY = Family(
    Config,
    DEFAULTS,
    _read,
    old_names={"model_max_length": "max_position_embeddings"},
    names=Names(qkv=("W_pack",)),
    amend=amend,
    doc=__doc__,
)
