"""Model families: a Hugging Face `model_type` names the Family that knows its config, its weights and its stages.

A module of a family declares what is its own and ends with its `FAMILY`; `family.py` says what one consists of.
"""

import dataclasses
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.rope import Rope
from jaxserve.loading.bounds import MAX_CONTEXT
from jaxserve.loading.causality import check_causal
from jaxserve.loading.model_types import check_model_type
from jaxserve.models import (
    afmoe,
    apertus,
    arcee,
    baichuan,
    bailing_hybrid,
    bailing_moe,
    bamba,
    bloom,
    chatglm,
    cohere,
    cohere2,
    cohere2_moe,
    cwm,
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    exaone_moe,
    falcon,
    falcon_h1,
    gemma,
    gemma2,
    gemma3,
    gemma3n,
    gemma4,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_swa,
    granitemoe,
    granitemoe_swa,
    granitemoehybrid,
    helium,
    hunyuan_v1_dense,
    hunyuan_v1_moe,
    hy_v3,
    hyperclovax,
    internlm3,
    iquestcoder,
    jais2,
    kimi_k2,
    kimi_linear,
    laguna,
    lfm2,
    lfm2_moe,
    llama,
    llama4,
    mamba2,
    mellum,
    mimo,
    mimo_v2_flash,
    minimax_m2,
    ministral3,
    mistral,
    mistral4,
    mixtral,
    nemotron,
    nemotron_h,
    olmo,
    olmo2,
    olmo3,
    olmo_hybrid,
    olmoe,
    opt,
    phi,
    phi3,
    phimoe,
    qwen,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_vl_moe,
    seed_oss,
    smollm3,
    solar_open,
    stablelm,
    starcoder2,
    vaultgemma,
    youtu,
)
from jaxserve.models.family import Family

FAMILIES: dict[str, Family] = {
    "afmoe": afmoe.FAMILY,
    "apertus": apertus.FAMILY,
    "arcee": arcee.FAMILY,
    "baichuan": baichuan.FAMILY,
    "bailing_hybrid": bailing_hybrid.FAMILY,
    "bailing_moe": bailing_moe.FAMILY,
    "bailing_moe_v2": bailing_moe.FAMILY,
    "bamba": bamba.FAMILY,
    "bloom": bloom.FAMILY,
    "chatglm": chatglm.FAMILY,
    "cohere": cohere.FAMILY,
    "cohere2": cohere2.FAMILY,
    "cohere2_moe": cohere2_moe.FAMILY,
    "cwm": cwm.FAMILY,
    "deepseek_v2": deepseek_v2.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
    "dots1": dots1.FAMILY,
    "ernie4_5": ernie4_5.FAMILY,
    "ernie4_5_moe": ernie4_5_moe.FAMILY,
    "exaone4": exaone4.FAMILY,
    "exaone_moe": exaone_moe.FAMILY,
    "falcon": falcon.FAMILY,
    "falcon_h1": falcon_h1.FAMILY,
    "gemma": gemma.FAMILY,
    "gemma2": gemma2.FAMILY,
    "gemma3_text": gemma3.FAMILY,
    "gemma3n_text": gemma3n.FAMILY,
    "gemma4_text": gemma4.FAMILY,
    "glm": glm.FAMILY,
    "glm4": glm4.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "glm4_moe_lite": glm4_moe_lite.FAMILY,
    "gpt2": gpt2.FAMILY,
    "gpt_neox": gpt_neox.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "gptj": gptj.FAMILY,
    "granite": granite.FAMILY,
    "granite_swa": granite_swa.FAMILY,
    "granitemoe": granitemoe.FAMILY,
    "granitemoe_swa": granitemoe_swa.FAMILY,
    "granitemoehybrid": granitemoehybrid.FAMILY,
    "granitemoeshared": granitemoe.FAMILY,
    "helium": helium.FAMILY,
    "hunyuan_v1_dense": hunyuan_v1_dense.FAMILY,
    "hunyuan_v1_moe": hunyuan_v1_moe.FAMILY,
    "hy_v3": hy_v3.FAMILY,
    "hyperclovax": hyperclovax.FAMILY,
    "internlm3": internlm3.FAMILY,
    "iquestcoder": iquestcoder.FAMILY,
    "jais2": jais2.FAMILY,
    "kimi_k2": kimi_k2.FAMILY,
    "kimi_linear": kimi_linear.FAMILY,
    "laguna": laguna.FAMILY,
    "lfm2": lfm2.FAMILY,
    "lfm2_moe": lfm2_moe.FAMILY,
    "llama": llama.FAMILY,
    "llama4_text": llama4.FAMILY,
    "mamba2": mamba2.FAMILY,
    "mellum": mellum.FAMILY,
    "mimo": mimo.FAMILY,
    "mimo_v2_flash": mimo_v2_flash.FAMILY,
    "minimax_m2": minimax_m2.FAMILY,
    "ministral": mistral.FAMILY,
    "ministral3": ministral3.FAMILY,
    "mistral": mistral.FAMILY,
    "mistral4": mistral4.FAMILY,
    "mixtral": mixtral.FAMILY,
    "nemotron": nemotron.FAMILY,
    "nemotron_h": nemotron_h.FAMILY,
    "olmo": olmo.FAMILY,
    "olmo2": olmo2.FAMILY,
    "olmo3": olmo3.FAMILY,
    "olmo_hybrid": olmo_hybrid.FAMILY,
    "olmoe": olmoe.FAMILY,
    "opt": opt.FAMILY,
    "phi": phi.FAMILY,
    "phi3": phi3.FAMILY,
    "phimoe": phimoe.FAMILY,
    "qwen": qwen.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_5_moe_text": qwen3_5_moe.FAMILY,
    "qwen3_5_text": qwen3_5.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
    "qwen3_vl_moe_text": qwen3_vl_moe.FAMILY,
    "seed_oss": seed_oss.FAMILY,
    "smollm3": smollm3.FAMILY,
    "solar_open": solar_open.FAMILY,
    "stablelm": stablelm.FAMILY,
    "starcoder2": starcoder2.FAMILY,
    "vaultgemma": vaultgemma.FAMILY,
    "youtu": youtu.FAMILY,
}


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
