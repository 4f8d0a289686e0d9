"""Refuse models whose tokens attend to later ones: every family here computes causal attention. No jax."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxserve.errors import CheckpointError

_FIELD_OF_BOTH_WAYS = re.compile(r"bi_?direc|non_?causal|encoder_only")
_FIELD_OF_ONE_WAY = re.compile(r"(^|_)(causal|unidirectional)(_|$)")
_VALUE_OF_BOTH_WAYS = re.compile(r"bi[-_ ]?direc|non[-_ ]?causal", re.IGNORECASE)
# LlamaBidirectionalModel, and LLM2Vec's MistralBiModel, LlamaBiForMNTP, LlamaEncoderModel
_CLASS_OF_BOTH_WAYS = re.compile(r"[Bb]i_?[Dd]irec|(?<=[a-z0-9])(Bi|Encoder)(?=Model|For)")


def check_causal(fields: Mapping[str, Any], *, prefix: str = "") -> None:
    """Raise CheckpointError, naming the field of a config.json by which tokens attend to later ones as well.

    `prefix` is where `fields` are within it.
    """
    for name, value in fields.items():
        if _is_of_both_ways(name, value):
            raise CheckpointError(
                f"config.json: {prefix}{name} {value!r:.100} is not supported: attention is causal here, and this "
                "model's tokens attend to later ones too"
            )
        if isinstance(value, dict) and name != "auto_map":
            check_causal(value, prefix=f"{prefix}{name}.")


def _is_of_both_ways(name: str, value: Any) -> bool:
    if name in ("architectures", "auto_map"):
        return any(_CLASS_OF_BOTH_WAYS.search(text) for text in _texts(value))
    if name == "model_type":
        return isinstance(value, str) and bool(_FIELD_OF_BOTH_WAYS.search(value.lower()))
    if _FIELD_OF_BOTH_WAYS.search(name.lower()):
        return bool(value) and value != "vision"  # images alone
    if _FIELD_OF_ONE_WAY.search(name.lower()) and isinstance(value, int) and not value:
        return True
    is_of_attention = re.search("attention|attn|mask", name.lower())
    return bool(is_of_attention) and isinstance(value, str) and bool(_VALUE_OF_BOTH_WAYS.search(value))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)
