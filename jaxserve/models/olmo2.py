"""OLMo 2 (OLMo Team 2025, arXiv:2501.00656): Llama with norms after blocks instead of before, and over all of q and
k.
"""

from typing import Any

from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import POST_NORMS
from jaxserve.models import hf_config
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 50304,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
}


def _read(fields: dict[str, Any]) -> DecoderConfig:
    return read_config(DecoderConfig, fields, **hf_config.biases(fields), head_norm="joint", norms=POST_NORMS)


FAMILY = Family(DecoderConfig, DEFAULTS, _read, doc=__doc__, features=("QK norm", "norms after blocks"))
