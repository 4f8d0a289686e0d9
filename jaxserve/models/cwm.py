"""Code World Model (FAIR CodeGen Team 2025, arXiv:2510.02387): Mistral with windows in three of four layers."""

from typing import Any

from jaxserve.layers.decoder import WindowedConfig
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 128256, "hidden_size": 6144, "intermediate_size": 21504, "num_hidden_layers": 64,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05, "sliding_window": 8192, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
    }
}  # fmt: skip


def _read(fields: dict[str, Any]) -> WindowedConfig:
    window = hf_config.optional_integer(fields, "sliding_window")
    num_layers = hf_config.integer(fields, "num_hidden_layers")
    default = ["sliding_attention" if index % 4 else "full_attention" for index in range(num_layers)]
    windows = hf_config.windows_by_type(fields, window, default)
    rope, has_bias = hf_rope.rope(fields, theta=1_000_000.0), hf_config.flag(fields, "mlp_bias")
    return read_config(WindowedConfig, fields, mlp_bias=has_bias, sliding_windows=windows, rope=rope)


FAMILY = Family(WindowedConfig, DEFAULTS, _read, doc=__doc__)
