"""SmolLM3 (Hugging Face 2025, huggingface.co/HuggingFaceTB/SmolLM3-3B): Llama that rotates in three of four layers."""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.layer import Layer
from jaxserve.models import hf_config, hf_rope, llama
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """The shape of one SmolLM3."""

    rotates: tuple[bool, ...]
    sliding_windows: tuple[int | None, ...]


def _read(fields: dict[str, Any]) -> Config:
    rotates, window = hf_config.rotating_layers(fields), hf_config.used_window(fields)
    kinds = ["full_attention" if rotated or window is None else "sliding_attention" for rotated in rotates]
    return read_config(
        Config,
        fields,
        rotates=rotates,
        sliding_windows=hf_config.windows_by_type(fields, window, kinds),
        rope=hf_rope.rope(fields, theta=2_000_000.0),
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = config.attention
    return tuple(
        replace(config.layer, mixer=replace(attention, rope=config.rope if rotates else None, sliding_window=window))
        for rotates, window in zip(config.rotates, config.sliding_windows, strict=True)
    )


FAMILY = Family(Config, DEFAULTS, _read, layers=layers, doc=__doc__)
