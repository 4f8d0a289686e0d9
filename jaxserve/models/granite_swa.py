"""Granite with windows (Granite Team 2026, huggingface.co/ibm-granite/granite-swash-2b): Granite with sinks, windows in
some layers, and a base of the rotation for each layer.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.attention import Attention
from jaxserve.layers.layer import Layer
from jaxserve.models import granite, hf_config, hf_rope

DEFAULTS: dict[str, Any] = granite.DEFAULTS | {
    "vocab_size": 100352, "hidden_size": 2560, "intermediate_size": 8192, "num_hidden_layers": 24,
    "num_attention_heads": 20, "num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True, "sliding_window": 128
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(granite.Config):
    """The shape of one Granite with windows."""

    sliding_windows: tuple[int | None, ...]
    thetas: tuple[float | None, ...]
    """Base of each layer's rotation, which is `rope` but for that; None in layers that do not rotate."""


def read_layers(fields: dict[str, Any]) -> dict[str, Any]:
    """Read the rotation, and each layer's window and base. Raises CheckpointError unless each layer has a base."""
    num_layers, rope = hf_config.integer(fields, "num_hidden_layers"), hf_rope.rope(fields)
    window = hf_config.optional_integer(fields, "sliding_window")
    default = ["sliding_attention" if index % 4 else "full_attention" for index in range(num_layers)]
    windows = hf_config.windows_by_type(fields, window, default)
    thetas = fields.get("layer_rope_theta", [rope.theta] * num_layers)
    if not isinstance(thetas, list) or len(thetas) < num_layers:
        raise CheckpointError(
            f"config.json: layer_rope_theta must have a number for each of {num_layers} layers, got {thetas!r:.100}"
        )
    return {"rope": rope, "sliding_windows": windows, "thetas": tuple(map(_theta, thetas[:num_layers]))}


def _theta(given: Any) -> float | None:
    if given == 0 and not isinstance(given, bool):
        return None
    if (theta := hf_config.number({"layer_rope_theta": given}, "layer_rope_theta")) <= 1.0:
        raise CheckpointError(f"config.json: layer_rope_theta must be 0 or greater than 1, got {theta:g}")
    return theta


def with_sinks(config: Any, layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return layers with sinks, and with the windows and bases that `read_layers` has read."""

    def attention(layer: Layer, window: int | None, theta: float | None) -> Attention:
        assert isinstance(layer.mixer, Attention)
        rope = None if theta is None else replace(config.rope, theta=theta)
        return replace(layer.mixer, has_sinks=True, sliding_window=window, rope=rope)

    return tuple(
        replace(layer, mixer=attention(layer, window, theta))
        for layer, window, theta in zip(layers, config.sliding_windows, config.thetas, strict=True)
    )


def _read(fields: dict[str, Any]) -> Config:
    return granite.read(Config, fields, **read_layers(fields))


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    return with_sinks(config, config.layers)


FAMILY = replace(
    granite.FAMILY, Config=Config, defaults=DEFAULTS, read=_read, layers=layers, doc=__doc__, features=("sinks",)
)
