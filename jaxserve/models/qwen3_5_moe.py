"""Text of Qwen 3.5, 3.6 and 3.8 with experts (Qwen team 2026, github.com/QwenLM/Qwen3.6): the layers of Qwen 3 Next."""

from dataclasses import replace
from typing import Any

from jaxserve.layers.names import Names
from jaxserve.models import qwen3_5, qwen3_next

DEFAULTS: dict[str, Any] = {"vocab_size": 248320, "num_hidden_layers": 40, "num_experts_per_tok": 8, "num_experts": 256}
"""Defaults of this family's config in transformers that differ from those of Qwen 3 Next."""

FIXED: dict[str, Any] = {
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "intermediate_size": qwen3_next.DEFAULTS["intermediate_size"],
}
"""Fields of Qwen 3 Next that this family does not read: all layers have experts."""


def _revise(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None} | FIXED


FAMILY = replace(
    qwen3_next.FAMILY,
    defaults=qwen3_next.DEFAULTS | DEFAULTS,
    revise=_revise,
    names=Names(delta_net=qwen3_5.DELTA_NAMES),
    doc=__doc__,
)
