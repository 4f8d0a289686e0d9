"""Jais 2 (Inception 2025, huggingface.co/inceptionai/Jais-2-8B-Chat): Llama with layer norms, biases, and a squared
ReLU without a gate.
"""

from typing import Any

from jaxserve.models import hf_config, llama
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 150272, "hidden_size": 3328, "intermediate_size": 26624, "num_attention_heads": 26,
    "hidden_act": "relu2", "max_position_embeddings": 8192, "layer_norm_eps": 1e-05, "attention_bias": True,
    "mlp_bias": True
}  # fmt: skip


def _read(fields: dict[str, Any]) -> llama.Config:
    norm_eps = hf_config.number(fields, "layer_norm_eps")
    return read_config(llama.Config, fields, norm_eps=norm_eps, norm_kind="layer", is_gated=False)


FAMILY = Family(llama.Config, DEFAULTS, _read, doc=__doc__)
