"""AFM 4.5B (Arcee AI 2025, huggingface.co/arcee-ai/AFM-4.5B): Llama with a squared ReLU and no gate."""

from typing import Any

from jaxserve.models import llama
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 32000, "hidden_size": 2560, "intermediate_size": 18432, "hidden_act": "relu2",
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-05
}  # fmt: skip


def _read(fields: dict[str, Any]) -> llama.Config:
    return read_config(llama.Config, fields, is_gated=False)


FAMILY = Family(llama.Config, DEFAULTS, _read, doc=__doc__)
