"""Mistral and Ministral (Jiang et al. 2023, arXiv:2310.06825): Llama without biases, and a sliding window in all layers
(or in those that `layer_types` names), or in none.
"""

from typing import Any

from jaxserve.layers.decoder import WindowedConfig
from jaxserve.models import hf_config
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


def _read(fields: dict[str, Any]) -> WindowedConfig:
    window = hf_config.optional_integer(fields, "sliding_window")
    kind = "full_attention" if window is None else "sliding_attention"
    everywhere = [kind] * hf_config.integer(fields, "num_hidden_layers")
    return read_config(WindowedConfig, fields, sliding_windows=hf_config.windows_by_type(fields, window, everywhere))


FAMILY = Family(WindowedConfig, DEFAULTS, _read, doc=__doc__)
