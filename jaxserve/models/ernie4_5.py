"""ERNIE 4.5 0.3B (Baidu 2025, ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf): Llama that rotates pairs of
neighbouring dimensions.
"""

from typing import Any

from jaxserve.layers.names import Names
from jaxserve.models import hf_config, hf_rope, llama
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "tie_word_embeddings": True
}  # fmt: skip


def _read(fields: dict[str, Any]) -> llama.Config:
    has_biases = hf_config.flag(fields, "use_bias")
    return read_config(
        llama.Config, fields, attention_bias=has_biases, mlp_bias=has_biases, rope=hf_rope.rope(fields, theta=500_000.0)
    )


FAMILY = Family(llama.Config, DEFAULTS, _read, names=Names(is_interleaved=True), doc=__doc__)
