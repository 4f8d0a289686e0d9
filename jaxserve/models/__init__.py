"""Model families: a Hugging Face `model_type` names the module that knows its config, its weights and its forward pass.

Every module has `Config` (frozen, hashable, `from_hf`, with `vocab_size`, `num_layers`, `max_position_embeddings`),
`param_specs(config)`, `kv_specs(config)`, `forward(params, config, batch, kv_cache)` and
`logits(params, config, hidden, kernels)`; all functions are pure. If layers may have different windows, layer `index`
attends with `batch.of_layer(index)`. A module may have `FEATURES`: features of all its checkpoints that no field of the
config mentions. With grouped, rotated heads its `Config` extends `layers.decoder.DecoderConfig`. If its layers are
not those of `layers.decoder.decoder`, for which there are fused kernels, `OWN_LAYERS` says what they have in addition.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.decoder import layer_shapes
from jaxserve.layers.params import Params
from jaxserve.layers.paths import Kind, StepShape, describe
from jaxserve.layers.rope import Rope, frequencies
from jaxserve.loading.bounds import MAX_CONTEXT
from jaxserve.models import (
    bloom,
    cohere,
    deepseek_v2,
    deepseek_v3,
    falcon,
    gemma,
    gemma2,
    gemma3,
    glm,
    glm4,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    opt,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    stablelm,
    starcoder2,
)

FAMILIES: dict[str, ModuleType] = {
    "bloom": bloom,
    "cohere": cohere,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "falcon": falcon,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "glm": glm,
    "glm4": glm4,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "gpt_oss": gpt_oss,
    "gptj": gptj,
    "granite": granite,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "olmo2": olmo2,
    "opt": opt,
    "phi": phi,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "stablelm": stablelm,
    "starcoder2": starcoder2,
}


def get_family(hf_config: dict[str, Any]) -> ModuleType:
    """Return the module that serves checkpoints of this config. Raises CheckpointError for an unknown `model_type`."""
    model_type = hf_config.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    what = "there is no model_type" if model_type is None else f"unknown model_type {model_type!r:.100}"
    raise CheckpointError(f"config.json: {what}; `jaxserve models` lists the known ones")


def describe_paths(
    family: ModuleType, config: Any, layers: Sequence[Params], caches: Sequence[Any], steps: Iterable[StepShape]
) -> list[str]:
    """Return lines that say how a family's model runs its layers in such steps, and why it has no faster path.

    `layers` and `caches` are the weights and LayerCaches, or their shapes.
    """
    if (own := getattr(family, "OWN_LAYERS", None)) is not None:
        return [f"all steps: {Kind.OPERATIONS} (no fused layer has {own})"]
    shapes = layer_shapes(
        layers,
        caches,
        activation=config.activation,
        sliding_windows=[spec.sliding_window for spec in family.kv_specs(config)],
        num_rotated=len(frequencies(config.rope)),
    )
    return describe(shapes, steps)


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
