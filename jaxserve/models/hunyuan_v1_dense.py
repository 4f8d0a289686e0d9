"""Hunyuan dense, 0.5B to 7B (Tencent 2025, huggingface.co/tencent/Hunyuan-7B-Instruct): Llama that normalises queries
and keys after it has rotated them.
"""

from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.attention import Attention, HeadNorm
from jaxserve.layers.decoder import BiasedConfig
from jaxserve.layers.layer import Layer
from jaxserve.layers.names import Names
from jaxserve.layers.rope import Rope
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 290943,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
}

OLD_NAMES = {"attention_head_dim": "head_dim"}
NAMES = Names(q_norm="query_layernorm", k_norm="key_layernorm")


def _read(fields: dict[str, Any]) -> BiasedConfig:
    check(fields)
    return read_config(BiasedConfig, fields, rope=rope(fields))


def check(fields: dict[str, Any]) -> None:
    """Raise CheckpointError, naming the field, for what neither these models nor those with experts support."""
    hf_config.require(fields, use_qk_norm=True, use_cla=False, mlp_bias=False, use_rotary_pos_emb=True)


def rope(fields: dict[str, Any]) -> Rope:
    """Read the rotation, whose base a field `alpha` of rope_type "dynamic" stretches once for all lengths of texts."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    scaling = fields.get(name)
    if not isinstance(scaling, dict) or "alpha" not in scaling:
        return hf_rope.rope(fields)
    kind = scaling.get("rope_type", scaling.get("type"))
    stretch = hf_config.optional_number(scaling, "alpha") if scaling["alpha"] else None
    given = {key: value for key, value in scaling.items() if key != "alpha"}
    if kind != "dynamic" or stretch is None:
        return hf_rope.rope(fields | {name: given})
    # Without the rest of what "dynamic" says, of which nothing is used.
    rope = hf_rope.rope(fields | {name: given | {"rope_type": "default"}})
    if rope.head_dim == 2:
        raise CheckpointError("config.json: alpha needs more than 2 rotated dimensions of a head")
    return replace(rope, theta=rope.theta * stretch ** (rope.head_dim / (rope.head_dim - 2)))


def attention(config: BiasedConfig) -> Attention:
    """Return the attention block."""
    return replace(config.attention, head_norm=HeadNorm(norm=config.norm, is_after_rotation=True))


def layers(config: BiasedConfig) -> tuple[Layer, ...]:
    """Return the layers."""
    return (replace(config.layer, mixer=attention(config)),) * config.num_layers


FAMILY = Family(
    BiasedConfig, DEFAULTS, _read, old_names=OLD_NAMES, layers=layers, names=NAMES, doc=__doc__, features=("QK norm",)
)
