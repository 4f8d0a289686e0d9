"""Model families: a Hugging Face `model_type` names the module that knows its config, its weights and its forward pass.

Every module has `Config` (frozen, hashable, `from_hf`, with `vocab_size`, `num_layers`, `max_position_embeddings`),
`param_specs(config)`, `kv_specs(config)`, `forward(params, config, batch, kv_cache, attention)` and
`logits(params, config, hidden)`; all functions are pure.
"""

from types import ModuleType
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models import (
    cohere,
    gemma,
    gemma2,
    gemma3,
    glm,
    glm4,
    gpt2,
    gpt_neox,
    gptj,
    granite,
    llama,
    mistral,
    olmo2,
    opt,
    phi,
    phi3,
    qwen2,
    qwen3,
    stablelm,
    starcoder2,
)

FAMILIES: dict[str, ModuleType] = {
    "cohere": cohere,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "glm": glm,
    "glm4": glm4,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "gptj": gptj,
    "granite": granite,
    "llama": llama,
    "mistral": mistral,
    "olmo2": olmo2,
    "opt": opt,
    "phi": phi,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "stablelm": stablelm,
    "starcoder2": starcoder2,
}


def get_family(hf_config: dict[str, Any]) -> ModuleType:
    """The module that serves checkpoints of this config. Raises CheckpointError for an unknown `model_type`."""
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(f"config.json: unknown model_type {model_type!r}; known are {', '.join(FAMILIES)}")
    return FAMILIES[model_type]
