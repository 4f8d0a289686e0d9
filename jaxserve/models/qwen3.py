"""Qwen 3, dense (Yang et al. 2025, arXiv:2505.09388): Qwen 2 with norms on the heads of q and k instead of biases."""

from typing import Any

from jaxserve.layers.decoder import WindowedConfig
from jaxserve.models import hf_config, qwen2
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = qwen2.DEFAULTS | {"head_dim": 128}


def _read(fields: dict[str, Any]) -> WindowedConfig:
    return read_config(
        WindowedConfig,
        fields,
        **hf_config.biases(fields),
        head_dim=hf_config.integer(fields, "head_dim"),
        head_norm="shared",
        sliding_windows=hf_config.layer_windows(fields),
    )


FAMILY = Family(WindowedConfig, DEFAULTS, _read, doc=__doc__, features=("QK norm",))
