"""EXAONE 4 (LG AI Research 2025, arXiv:2507.11407): OLMo 2 with norms of each head; models with windows do not rotate
in the other layers.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.attention import HeadNorm
from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import POST_NORMS, Layer
from jaxserve.models import hf_config
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05, "sliding_window": 4096
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one EXAONE 4."""

    rotates: tuple[bool, ...]
    sliding_windows: tuple[int | None, ...]


def read_windows(fields: dict[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's sliding window."""
    pattern = fields.get("sliding_window_pattern")  # a number or, as in "LLLG", letters of which the last is "G"
    if isinstance(pattern, str) and pattern == "L" * (len(pattern) - 1) + "G":
        fields["sliding_window_pattern"] = len(pattern)
    window = hf_config.optional_integer(fields, "sliding_window")
    period = 1 if window is None else hf_config.integer(fields, "sliding_window_pattern", 4)
    return hf_config.periodic_windows(fields, window, period=period)


def _read(fields: dict[str, Any]) -> Config:
    windows, has_none = read_windows(fields), fields.get("sliding_window") is None
    return read_config(
        Config,
        fields,
        rotates=tuple(has_none or window is not None for window in windows),
        sliding_windows=windows,
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = replace(config.attention, head_norm=HeadNorm(norm=config.norm))
    layer = replace(config.layer, mixer=attention, norms=POST_NORMS)
    return tuple(
        replace(layer, mixer=replace(attention, rope=config.rope if rotates else None, sliding_window=window))
        for rotates, window in zip(config.rotates, config.sliding_windows, strict=True)
    )


FAMILY = Family(Config, DEFAULTS, _read, layers=layers, doc=__doc__, features=("QK norm", "norms after blocks"))
