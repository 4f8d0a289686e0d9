"""Model families: a Hugging Face `model_type` names the Family that knows its config, its weights and its stages.

A module of a family declares what is its own and ends with its `FAMILY`; `family.py` says what one consists of.
"""

import dataclasses
import importlib
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.rope import Rope
from jaxserve.loading.bounds import MAX_CONTEXT
from jaxserve.loading.causality import check_causal
from jaxserve.loading.model_types import MODEL_TYPES, check_model_type
from jaxserve.models.family import Family

_MODULES = {"bailing_moe_v2": "bailing_moe", "granitemoeshared": "granitemoe", "ministral": "mistral"}
"""Modules of families whose `model_type` is not their name, less "_text"."""


def _family(model_type: str) -> Family:
    module = _MODULES.get(model_type, model_type.removesuffix("_text"))
    return importlib.import_module(f"{__name__}.{module}").FAMILY


FAMILIES: dict[str, Family] = {name: _family(name) for name in sorted(MODEL_TYPES)}


def get_family(hf_config: dict[str, Any]) -> Family:
    """Return the family that serves checkpoints of this config.

    Raises CheckpointError for attention to later tokens, which no family computes, and for an unknown `model_type`.
    """
    check_model_type(hf_config)
    check_causal(hf_config)
    if (model_type := hf_config.get("model_type")) is not None:
        return FAMILIES[model_type]
    raise CheckpointError("config.json: there is no model_type; `jaxserve models` lists the known ones")


def max_context(config: Any) -> int:
    """Return the longest context that a family's `config` can be served with: its own, or more where its rotations are
    stretched.
    """
    stretched = max((rope.max_context for rope in _ropes(config).values()), default=0)
    return max(config.max_position_embeddings, min(stretched, MAX_CONTEXT))


def with_context(config: Any, context: int) -> Any:
    """Return a family's `config` for texts of up to `context` tokens; its weights are unchanged."""
    ropes = {name: rope.serving(context) for name, rope in _ropes(config).items()}
    return dataclasses.replace(config, max_position_embeddings=context, **ropes)


def _ropes(config: Any) -> dict[str, Rope]:
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in fields.items() if isinstance(value, Rope)}
