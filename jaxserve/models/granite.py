"""Granite 3 (Granite Team 2024, github.com/ibm-granite/granite-3.0-language-models): Llama with four multipliers."""

import dataclasses
from typing import Any

from jaxtyping import Array, Float

from jaxserve.layers.activations import scaled
from jaxserve.layers.batch import Batch
from jaxserve.layers.context import StepContext
from jaxserve.layers.embedding import embed
from jaxserve.layers.params import Params
from jaxserve.models import hf_config, llama
from jaxserve.models.family import Family, logits
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048, "embedding_multiplier": 1.0,
    "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """The shape of one Granite."""

    embedding_multiplier: float
    logits_scaling: float


def read[C: Config](cls: type[C], fields: dict[str, Any], **own: Any) -> C:
    """Read the Config of a Granite or of one of its relatives, which read `own`."""
    scales = {"score_scale": "attention_multiplier", "update_scale": "residual_multiplier"}
    return read_config(cls, fields, **{name: hf_config.number(fields, key) for name, key in scales.items()}, **own)


def _read(fields: dict[str, Any]) -> Config:
    return read(Config, fields)


def embed_tokens(params: Params, config: Config, batch: Batch) -> Float[Array, "T E"]:
    """Return scaled rows of the embedding."""
    return scaled(embed(params["embed"], batch), config.embedding_multiplier)


def head(params: Params, config: Config, hidden: Float[Array, "N E"], context: StepContext) -> Float[Array, "N V"]:
    """Return scaled logits in float32."""
    return logits(params, config, hidden, context) / config.logits_scaling


FAMILY = Family(Config, DEFAULTS, _read, embed=embed_tokens, head=head, doc=__doc__)
