"""Llama 1, 2, 3 and 3.1 to 3.3 (Touvron et al. 2023, arXiv:2302.13971; Grattafiori et al. 2024, arXiv:2407.21783)."""

import dataclasses
from typing import Any

from jaxserve.layers.decoder import BiasedConfig
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA

DEFAULTS: dict[str, Any] = LLAMA | {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048}

OLD_NAMES = {"max_sequence_length": "max_position_embeddings"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(BiasedConfig):
    """The shape of one Llama."""

    mlp_bias: bool = dataclasses.field()  # without the default of DecoderConfig, so that it is read


FAMILY = Family(Config, DEFAULTS, old_names=OLD_NAMES, doc=__doc__)
