"""OLMo 2 (OLMo Team 2025, arXiv:2501.00656): Llama with norms after blocks instead of before, and over all of q and
k.
"""

import dataclasses
import functools
import math
from typing import Any

from jaxtyping import Array, Float

from jaxserve.layers.attention import attention_specs, self_attention
from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.decoder import DecoderConfig, Norm, decoder_specs, plain_layers
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.layers.rope import rotations
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one OLMo 2."""

    attention_bias: bool

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS)
        return cls(
            **hf_config.as_llama(fields),
            attention_bias=hf_config.flag(fields, "attention_bias"),
            rope=hf_rope.rope(fields),
        )


def param_specs(config: Config) -> Params:
    """Declare every weight."""

    def attention(prefix: str, config: Config) -> Params:
        H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
        specs = attention_specs(prefix, config, qkv_bias=config.attention_bias, out_bias=config.attention_bias)
        return specs | {
            "q_norm": _norm_spec(f"{prefix}.q_norm", (H, D), axis="heads"),
            "k_norm": _norm_spec(f"{prefix}.k_norm", (K, D), axis="kv_heads"),
        }

    return decoder_specs(
        config,
        attention=attention,
        norms={"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    )


def _norm_spec(source: str, shape: tuple[int, int], *, axis: str) -> ParamSpec:
    """Declare the gain, split into heads, of a norm over all heads together."""
    return ParamSpec(
        shape=shape,
        axes=(axis, None),
        source=(f"{source}.weight",),
        source_shapes=((math.prod(shape),),),
        init_scale=None,
    )


def norm_heads_together(norm: Norm, x: Float[Array, "T H D"], gain: Float[Array, "H D"]) -> Float[Array, "T H D"]:
    """Normalise all heads of a token as one vector."""
    return norm(x.reshape(x.shape[0], -1), gain.reshape(-1)).reshape(x.shape)


def layers(
    params: Params, config: Config, x: Float[Array, "T E"], batch: Batch, kv_cache: KVCache, span: range
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run these layers: see `Family.layers`."""
    rotation = rotations(config.rope, batch.positions)
    norm = functools.partial(rms_norm, eps=config.norm_eps)
    attend = functools.partial(self_attention, rotation=rotation, norm=functools.partial(norm_heads_together, norm))
    return plain_layers(params, config, x, batch, kv_cache, span, attend=attend, norm=norm)


FAMILY = Family(
    Config=Config,
    param_specs=param_specs,
    layers=layers,
    doc=__doc__,
    features=("QK norm", "norms after blocks"),
    own_layers="norms after blocks",
)
