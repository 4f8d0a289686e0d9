"""Nemotron 4 and Minitron (Parmar et al. 2024, arXiv:2402.16819): layer norms, a squared ReLU without a gate, and half
of each head rotated.
"""

from typing import Any

from jaxserve.models import hf_config, hf_rope, llama
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 256000, "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 48,
    "hidden_act": "relu2", "max_position_embeddings": 4096, "norm_eps": 1e-05
}  # fmt: skip


def _read(fields: dict[str, Any]) -> llama.Config:
    return read_config(
        llama.Config,
        fields,
        norm_eps=hf_config.number(fields, "norm_eps"),
        norm_kind="layer",
        norm_offset=1.0,
        is_gated=False,
        rope=hf_rope.rope(fields, partial_rotary_factor=0.5),
    )


FAMILY = Family(llama.Config, DEFAULTS, _read, doc=__doc__)
