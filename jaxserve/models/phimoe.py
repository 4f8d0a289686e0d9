"""Phi-3.5 MoE (Abdin et al. 2024, arXiv:2404.14219): Mixtral with layer norms and experts chosen by SparseMixer."""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.moe import Routing
from jaxserve.layers.params import Params
from jaxserve.layers.rope import LongRopeScaling, Rope
from jaxserve.models import hf_config, hf_rope, mixtral, phi
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = mixtral.DEFAULTS | {
    "vocab_size": 32064,
    "intermediate_size": 6400,
    "num_experts": 16,
    "router_jitter_noise": 0.01,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(mixtral.Config):
    """The shape of one Phi-3.5 MoE; `intermediate_size` is that of one expert."""

    lm_head_bias: bool


def _read(fields: dict[str, Any]) -> Config:
    hf_config.require(fields, num_experts_per_tok=2)  # SparseMixer masks for two choices, one after the other
    return read_config(
        Config,
        fields,
        **hf_config.biases(fields),
        sliding_window=hf_config.optional_integer(fields, "sliding_window"),
        norm_kind="layer",
        routing=Routing(
            num_experts=hf_config.num_experts(fields),
            num_experts_per_token=2,
            scores="sparse_mixer",
            jitter=hf_config.number(fields, "router_jitter_noise"),
        ),
        rope=_rope(fields),
    )


def _rope(fields: dict[str, Any]) -> Rope:
    """Read LongRoPE, which has a length of rotated vectors for either list of factors."""
    parameters = hf_rope.rope_object(fields)
    mscales = {name: parameters.pop(name) for name in ("short_mscale", "long_mscale") if name in parameters}
    rope = hf_rope.rope(fields | {"rope_parameters": parameters, "rope_scaling": None}, theta=1e6)
    if rope.scaling is None:
        return rope
    if not isinstance(rope.scaling, LongRopeScaling):
        raise CheckpointError("config.json: rope_parameters of phimoe must have rope_type longrope or default")
    short, long = (hf_config.number(mscales, name) for name in ("short_mscale", "long_mscale"))
    return replace(rope, scaling=replace(rope.scaling, attention_factor=long, short_attention_factor=short))


def amend(specs: Params, config: Config) -> Params:
    """Declare the bias of the LM head."""
    return phi.amend(specs, config) if config.lm_head_bias else specs


FAMILY = replace(mixtral.FAMILY, Config=Config, defaults=DEFAULTS, read=_read, amend=amend, doc=__doc__)
