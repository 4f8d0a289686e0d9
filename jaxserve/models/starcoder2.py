"""StarCoder 2 (Lozhkov et al. 2024, arXiv:2402.19173): layer norm and a plain feed-forward, biases everywhere."""

from typing import Any

from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.names import Names
from jaxserve.models import hf_config
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
    "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096, "norm_epsilon": 1e-05, "use_bias": True, "tie_word_embeddings": True
}  # fmt: skip


def _read(fields: dict[str, Any]) -> DecoderConfig:
    return read_config(
        DecoderConfig,
        fields,
        **hf_config.plain_blocks(has_biases=hf_config.flag(fields, "use_bias")),
        norm_eps=hf_config.number(fields, "norm_epsilon"),
        sliding_window=hf_config.optional_integer(fields, "sliding_window"),
    )


NAMES = Names(up="c_fc", down="c_proj")
FAMILY = Family(DecoderConfig, DEFAULTS, _read, names=NAMES, doc=__doc__, features=("sliding_window",))
