"""Phi 1, 1.5 and 2 (Gunasekar et al. 2023, arXiv:2306.11644): attention parallel to the feed-forward, biases
everywhere.
"""

import dataclasses
import functools
from typing import Any

from jaxtyping import Array, Float

from jaxserve.layers.attention import attention_specs, self_attention
from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.decoder import DecoderConfig, Names, decoder_specs, parallel_block, plain_layers
from jaxserve.layers.embedding import lm_head_bias_spec
from jaxserve.layers.mlp import mlp, mlp_specs
from jaxserve.layers.norm import layer_norm, layer_norm_specs
from jaxserve.layers.params import Params
from jaxserve.layers.rope import rotations
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family

DEFAULTS: dict[str, Any] = {
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-05,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one Phi."""

    qk_layernorm: bool

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS)
        return cls(
            **hf_config.sizes(fields),
            head_dim=hf_config.head_dim(fields),
            norm_eps=hf_config.number(fields, "layer_norm_eps"),
            activation=hf_config.activation(fields),
            tie_word_embeddings=hf_config.flag(fields, "tie_word_embeddings"),
            qk_layernorm=hf_config.flag(fields, "qk_layernorm"),
            rope=hf_rope.rope(fields, partial_rotary_factor=0.5),
        )


def param_specs(config: Config) -> Params:
    """Declare every weight."""

    def attention(prefix: str, config: Config) -> Params:
        specs = attention_specs(prefix, config, qkv_bias=True, out_bias=True, output="dense")
        if config.qk_layernorm:
            specs["q_norm"] = layer_norm_specs(f"{prefix}.q_layernorm", config.head_dim)
            specs["k_norm"] = layer_norm_specs(f"{prefix}.k_layernorm", config.head_dim)
        return specs

    specs = decoder_specs(
        config,
        attention=attention,
        mlp=functools.partial(mlp_specs, up="fc1", down="fc2"),
        norm=layer_norm_specs,
        norms={"attention_norm": "input_layernorm"},
        names=Names(norm="model.final_layernorm"),
    )
    specs["lm_head_bias"] = lm_head_bias_spec("lm_head", config.vocab_size)
    return specs


def layers(
    params: Params, config: DecoderConfig, x: Float[Array, "T E"], batch: Batch, kv_cache: KVCache, span: range
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run these layers: see `Family.layers`."""
    norm = functools.partial(layer_norm, eps=config.norm_eps)
    rotation = rotations(config.rope, batch.positions)
    attend = functools.partial(self_attention, rotation=rotation, norm=norm)
    return plain_layers(
        params, config, x, batch, kv_cache, span, attend=attend, norm=norm, feed_forward=mlp, arrange=parallel_block
    )


FAMILY = Family(
    Config=Config,
    param_specs=param_specs,
    layers=layers,
    doc=__doc__,
    features=("parallel blocks",),
    own_layers="attention and feed-forward side by side",
)
