"""OLMo 3 (OLMo Team 2025, arXiv:2512.13961): OLMo 2 with a sliding window in three of four layers, whose rotations are
not scaled.
"""

from dataclasses import replace
from typing import Any

from jaxserve.layers.decoder import WindowedConfig
from jaxserve.layers.layer import POST_NORMS
from jaxserve.models import hf_config, hf_rope, olmo2
from jaxserve.models.reading import read_config

THETA = 500_000.0

DEFAULTS: dict[str, Any] = olmo2.DEFAULTS | {"sliding_window": 4096}


def _read(fields: dict[str, Any]) -> WindowedConfig:
    window = hf_config.optional_integer(fields, "sliding_window")
    rope, local_rope = hf_rope.ropes_by_type(fields, size=hf_config.head_dim(fields), theta=THETA, local_theta=THETA)
    return read_config(
        WindowedConfig,
        fields,
        **hf_config.biases(fields),
        head_norm="joint",
        norms=POST_NORMS,
        sliding_windows=hf_config.periodic_windows(fields, window, period=4),
        rope=rope,
        local_rope=local_rope,
    )


FEATURES = (*olmo2.FAMILY.features, "local_rope")
FAMILY = replace(olmo2.FAMILY, Config=WindowedConfig, defaults=DEFAULTS, read=_read, doc=__doc__, features=FEATURES)
