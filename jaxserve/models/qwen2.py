"""Qwen 2 and 2.5 (Yang et al. 2024, arXiv:2407.10671): Llama with biases on q, k and v, and windows on some layers."""

from typing import Any

from jaxserve.layers.decoder import WindowedConfig
from jaxserve.models import hf_config
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    "sliding_window": 4096, "max_window_layers": 28
}  # fmt: skip


def _read(fields: dict[str, Any]) -> WindowedConfig:
    return read_config(WindowedConfig, fields, qkv_bias=True, sliding_windows=hf_config.layer_windows(fields))


FAMILY = Family(WindowedConfig, DEFAULTS, _read, doc=__doc__)
