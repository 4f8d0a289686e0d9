"""SmolLM3 (Hugging Face 2025, huggingface.co/HuggingFaceTB/SmolLM3-3B): Llama that rotates in three of four layers."""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.layer import Layer
from jaxserve.models import hf_config, hf_rope, llama
from jaxserve.models.family import Family

DEFAULTS: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """The shape of one SmolLM3."""

    rotates: tuple[bool, ...]
    sliding_windows: tuple[int | None, ...]

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS)
        num_layers, interval = (
            hf_config.integer(fields, name, default)
            for name, default in (("num_hidden_layers", None), ("no_rope_layer_interval", 4))
        )
        # The list says which layers rotate, in spite of its name.
        flags = fields.get("no_rope_layers")
        if flags is None:
            flags = [int((index + 1) % interval != 0) for index in range(num_layers)]
        if not isinstance(flags, list) or len(flags) < num_layers or not all(flag in (0, 1) for flag in flags):
            raise CheckpointError(f"config.json: no_rope_layers must have 0 or 1 for each of {num_layers} layers")
        window = hf_config.optional_integer(fields, "sliding_window")
        window = window if hf_config.flag(fields, "use_sliding_window") else None
        kinds = ["full_attention" if rotates else "sliding_attention" for rotates in flags[:num_layers]]
        return cls(
            **hf_config.as_llama(fields),
            attention_bias=hf_config.flag(fields, "attention_bias"),
            mlp_bias=hf_config.flag(fields, "mlp_bias"),
            rotates=tuple(map(bool, flags[:num_layers])),
            sliding_windows=hf_config.windows_by_type(fields, window, kinds),
            rope=hf_rope.rope(fields, theta=2_000_000.0),
        )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    [layer, *_], attention = llama.layers(config), llama.attention(config)
    return tuple(
        replace(layer, mixer=replace(attention, rope=config.rope if rotates else None, sliding_window=window))
        for rotates, window in zip(config.rotates, config.sliding_windows, strict=True)
    )


FAMILY = Family(Config=Config, layers=layers, doc=__doc__)
