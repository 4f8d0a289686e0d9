"""Bamba (IBM, Princeton, CMU and UIUC 2024, huggingface.co/blog/bamba): Llama with Mamba-2 in place of the attention of
most layers, and half of each head rotated in the others.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.layer import Layer
from jaxserve.layers.mamba import Mamba2
from jaxserve.layers.names import Names
from jaxserve.models import hf_config, hf_rope, llama, mamba2
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = mamba2.HYBRID_DEFAULTS | {"max_position_embeddings": 262144}

ROTATED = 0.5
"""The part of a head that is rotated. As in transformers, a config may say otherwise in `rope_parameters` alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """The shape of one Bamba."""

    attends: tuple[bool, ...]
    mamba: Mamba2


def _read(fields: dict[str, Any]) -> Config:
    hf_config.require(fields, partial_rotary_factor=ROTATED)
    rope = hf_rope.rope(fields, partial_rotary_factor=ROTATED)
    hf_config.require(fields, attn_rotary_emb=rope.head_dim)
    return read_config(Config, fields, rope=rope, attends=_attends(fields), mamba=mamba2.hybrid_mixer(fields))


def _attends(fields: dict[str, Any]) -> tuple[bool, ...]:
    """Read which layers attend: `attn_layer_indices`. Raises CheckpointError for kinds of layers that contradict it."""
    indices = fields.get("attn_layer_indices") or []
    if not isinstance(indices, list) or not all(isinstance(index, int) for index in indices):
        raise CheckpointError(f"config.json: attn_layer_indices must be a list of integers, got {indices!r:.100}")
    attends = tuple(index in indices for index in range(hf_config.integer(fields, "num_hidden_layers")))
    kinds = ["full_attention" if each else "linear_attention" for each in attends]
    hf_config.require(fields, layer_types=kinds, layers_block_type=kinds)
    return attends


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attending = config.layer
    recurrent = replace(attending, mixer=config.mamba, mixer_name="mamba")
    return tuple(attending if attends else recurrent for attends in config.attends)


NAMES = Names(norm="model.final_layernorm", mlp="feed_forward", mlp_norm="pre_ff_layernorm")
FAMILY = replace(
    llama.FAMILY,
    Config=Config,
    defaults=DEFAULTS,
    read=_read,
    layers=layers,
    names=NAMES,
    doc=__doc__,
    features=("Mamba-2",),
)
