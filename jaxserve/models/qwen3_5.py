"""Text of Qwen 3.5, 3.6 and 3.8 (Qwen team 2026, github.com/QwenLM/Qwen3.6), dense: the layers of Qwen 3 Next without
experts.
"""

from typing import Any

from jaxserve.layers.layer import Layer
from jaxserve.layers.names import DeltaNames, Names
from jaxserve.models import qwen3_next
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = qwen3_next.DELTA_DEFAULTS | {
    "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4
}  # fmt: skip

DELTA_NAMES = DeltaNames(qkvz=("in_proj_qkv", "in_proj_z"), rates=("in_proj_b", "in_proj_a"))


def _read(fields: dict[str, Any]) -> qwen3_next.HybridConfig:
    return read_config(qwen3_next.HybridConfig, fields, **qwen3_next.HybridConfig.hybrid_fields(fields))


def layers(config: qwen3_next.HybridConfig) -> tuple[Layer, ...]:
    """Return the layers."""
    return config.hybrid((config.feed_forward,) * config.num_layers)


FAMILY = Family(
    qwen3_next.HybridConfig,
    DEFAULTS,
    _read,
    layers=layers,
    names=Names(delta_net=DELTA_NAMES),
    doc=__doc__,
    features=qwen3_next.FAMILY.features,
)
