"""The model types that are served, by name: known before jax is imported. No jax."""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.loading.multimodal import REFUSED, TEXT_OF, WRAPPERS

MODEL_TYPES = {
    *("afmoe", "apertus", "arcee", "baichuan", "bailing_hybrid", "bailing_moe", "bailing_moe_v2", "bamba", "bloom"),
    *("chatglm", "cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5"),
    *("ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "falcon_h1", "gemma", "gemma2", "gemma3_text", "gemma3n_text"),
    *("gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_neox", "gpt_oss", "gptj", "granite"),
    *("granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "kimi_k2"),
    *("kimi_linear", "laguna", "lfm2", "lfm2_moe", "llama", "llama4_text", "mamba2", "mellum", "mimo", "mimo_v2_flash"),
    *("minimax_m2", "ministral", "ministral3", "mistral", "mistral4", "mixtral", "nemotron", "nemotron_h", "olmo"),
    *("olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "phi", "phi3", "phimoe", "qwen", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text", "seed_oss", "smollm3"),
    *("solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu"),
}
"""The keys of `models.FAMILIES`. A config of another model type is refused as such before any of its fields is judged,
as these may mean something else there.
"""


def is_unknown(fields: Mapping[str, Any]) -> bool:
    """Return true if a config names a model type, and one that is not served, nor its text."""
    name = fields.get("model_type")
    return isinstance(name, str) and name not in MODEL_TYPES and name not in WRAPPERS


def check_model_type(fields: Mapping[str, Any], where: object = "config.json") -> None:
    """Raise CheckpointError if a config, whose path is `where`, names a model type that is not served."""
    name, whole = fields.get("model_type"), fields.get(TEXT_OF)
    if isinstance(name, str) and name in REFUSED:
        raise CheckpointError(f"{where}: model_type {name!r} is not supported: {REFUSED[name]}")
    if name is not None and (is_unknown(fields) or not isinstance(name, str)):
        if whole is not None:
            raise CheckpointError(f"{where}: unknown model_type {name!r:.100} of the text in {whole!r:.100}")
        raise CheckpointError(f"{where}: unknown model_type {name!r:.100}; `jaxserve models` lists the known ones")
