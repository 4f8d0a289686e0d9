"""EXAONE 4 (LG AI Research 2025, arXiv:2507.11407): OLMo 2 with norms of each head; models with windows do not rotate
in the other layers.
"""

from typing import Any

from jaxserve.layers.decoder import WindowedConfig
from jaxserve.layers.layer import POST_NORMS
from jaxserve.models import hf_config
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05, "sliding_window": 4096
}  # fmt: skip


def read_windows(fields: dict[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's sliding window."""
    pattern = fields.get("sliding_window_pattern")  # a number or, as in "LLLG", letters of which the last is "G"
    if isinstance(pattern, str) and pattern == "L" * (len(pattern) - 1) + "G":
        fields["sliding_window_pattern"] = len(pattern)
    window = hf_config.optional_integer(fields, "sliding_window")
    period = 1 if window is None else hf_config.integer(fields, "sliding_window_pattern", 4)
    return hf_config.periodic_windows(fields, window, period=period)


def _read(fields: dict[str, Any]) -> WindowedConfig:
    return read_config(
        WindowedConfig,
        fields,
        head_norm="shared",
        norms=POST_NORMS,
        sliding_windows=read_windows(fields),
        rotates_everywhere=fields.get("sliding_window") is None,
    )


FAMILY = Family(WindowedConfig, DEFAULTS, _read, doc=__doc__, features=("QK norm", "norms after blocks"))
