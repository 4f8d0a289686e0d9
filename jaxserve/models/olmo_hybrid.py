"""OLMo Hybrid (OLMo Team 2026, huggingface.co/allenai/Olmo-Hybrid-7B): three of four layers with the gated delta rule
and norms before blocks, the fourth as in OLMo 2, which may have no rotary embedding.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.decoder import BiasedConfig
from jaxserve.layers.delta_net import DeltaHeads, DeltaNet
from jaxserve.layers.layer import POST_NORMS, Layer
from jaxserve.layers.names import DeltaNames, Names
from jaxserve.models import hf_config, hf_rope, qwen3_next
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008, "num_attention_heads": 30,
    "max_position_embeddings": 65536, "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True
}  # fmt: skip

OUTPUT_NORM_EPS = 1e-5
"""The epsilon of the norms of heads with the gated delta rule, whatever a config specifies for all other norms."""

ROTATES = "rotates"
"""The name of a field that is false if the config says that the base of the rotary embedding is null."""

PERIOD = 4
"""Without `layer_types`, every layer of this number attends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(BiasedConfig):
    """The shape of one OLMo Hybrid."""

    attends: tuple[bool, ...]
    delta_heads: DeltaHeads
    max_beta: float


def _read(fields: dict[str, Any]) -> Config:
    return read_config(
        Config,
        fields,
        head_norm="joint",
        attends=_attending_layers(fields),
        delta_heads=_delta_heads(fields),
        max_beta=2.0 if hf_config.flag(fields, "linear_allow_neg_eigval") else 1.0,
        rope=hf_rope.rope(fields) if fields[ROTATES] else None,
    )


def _revise(fields: dict[str, Any]) -> dict[str, Any]:
    given = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    where = given if isinstance(given, dict) and "rope_theta" in given else fields
    return fields | {ROTATES: where.get("rope_theta", ...) is not None}


def _attending_layers(fields: dict[str, Any]) -> tuple[bool, ...]:
    attends = qwen3_next.attending_layers(fields | {"full_attention_interval": PERIOD})
    return attends if any(attends) or fields.get("layer_types") is not None else (*attends[:-1], True)


def _delta_heads(fields: dict[str, Any]) -> DeltaHeads:
    num_heads = hf_config.integer(fields, "num_attention_heads")
    num_key_heads = hf_config.integer(fields, "linear_num_key_heads", num_heads)
    key_size = int(0.75 * hf_config.integer(fields, "hidden_size") / num_key_heads)
    key_size = hf_config.integer(fields, "linear_key_head_dim", key_size)
    return qwen3_next.delta_heads(
        {
            "linear_num_key_heads": num_key_heads,
            "linear_num_value_heads": num_heads,
            "linear_key_head_dim": key_size,
            "linear_value_head_dim": 2 * key_size,
        }
        | {name: value for name, value in fields.items() if name.startswith("linear_")}
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attending = replace(config.layer, norms=POST_NORMS)
    delta_net = DeltaNet(
        heads=config.delta_heads, activation=config.activation, norm_eps=OUTPUT_NORM_EPS, max_beta=config.max_beta
    )
    recurrent = replace(config.layer, mixer=delta_net, mixer_name="linear_attn")
    return tuple(attending if attends else recurrent for attends in config.attends)


NAMES = Names(
    attention_norm="attention_layer_norm",
    mlp_norm="feedforward_layer_norm",
    delta_net=DeltaNames(
        qkvz=("q_proj", "k_proj", "v_proj", "g_proj"),
        rates=("b_proj", "a_proj"),
        convolution=("q_conv1d", "k_conv1d", "v_conv1d"),
        norm="o_norm",
        out="o_proj",
    ),
)
"""The names of norms before blocks are those of layers with the gated delta rule, of norms after blocks the others'."""
FAMILY = Family(
    Config,
    DEFAULTS,
    _read,
    revise=_revise,
    layers=layers,
    names=NAMES,
    doc=__doc__,
    features=("QK norm", "norms after blocks that attend", "gated delta rule"),
)
