"""IQuest-Coder V1 (IQuest Lab 2026, huggingface.co/IQuestLab/IQuest-Coder-V1-40B-Instruct): Llama of other sizes."""

from dataclasses import replace
from typing import Any

from jaxserve.models import hf_config, llama
from jaxserve.models.reading import LLAMA

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 76800, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 80,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05
}  # fmt: skip


def _revise(fields: dict[str, Any]) -> dict[str, Any]:
    """Refuse what the models' own code has, and no published checkpoint uses."""
    hf_config.require(fields, clip_qkv=None, use_sliding_window=False)
    return fields


FAMILY = replace(llama.FAMILY, defaults=DEFAULTS, old_names={}, revise=_revise, doc=__doc__)
