"""Command R7B and Command A (Cohere 2025, arXiv:2504.00698): Command R with windows in three of four layers, and no
rotation in the others.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.layer import Layer
from jaxserve.models import cohere, hf_config, hf_rope

DEFAULTS: dict[str, Any] = cohere.DEFAULTS | {"sliding_window": 4096}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(cohere.Config):
    """The shape of one Command R7B or Command A."""

    sliding_windows: tuple[int | None, ...]


def _read(fields: dict[str, Any]) -> Config:
    period = hf_config.integer(fields, "sliding_window_pattern", 4)
    window = hf_config.optional_integer(fields, "sliding_window")
    head_dim = hf_config.quotient(fields, "hidden_size", "num_attention_heads")
    return cohere.read(
        Config,
        fields,
        head_dim=head_dim,
        use_qk_norm=False,
        sliding_windows=hf_config.periodic_windows(fields, window, period=period),
        rope=hf_rope.rope(fields, size=head_dim),
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    rope, layer, attention = config.rope, config.layer, config.attention
    mixers = (replace(attention, sliding_window=size, rope=rope if size else None) for size in config.sliding_windows)
    return tuple(replace(layer, mixer=mixer) for mixer in mixers)


FAMILY = replace(cohere.FAMILY, Config=Config, defaults=DEFAULTS, read=_read, layers=layers, doc=__doc__)
