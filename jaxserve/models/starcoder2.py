"""StarCoder 2 (Lozhkov et al. 2024, arXiv:2402.19173): layer norm and a plain feed-forward, biases everywhere."""

import dataclasses
import functools
from typing import Any

from jaxtyping import Array, Float

from jaxserve.layers.attention import Scores, attention_specs, self_attention
from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.decoder import DecoderConfig, decoder_specs, plain_layers
from jaxserve.layers.mlp import mlp, mlp_specs
from jaxserve.layers.norm import layer_norm, layer_norm_specs
from jaxserve.layers.params import Params
from jaxserve.layers.rope import rotations
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family

DEFAULTS: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-05,
    "use_bias": True,
    "tie_word_embeddings": True,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one StarCoder 2."""

    bias: bool
    sliding_window: int | None

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS)
        return cls(
            **hf_config.sizes(fields),
            head_dim=hf_config.head_dim(fields),
            norm_eps=hf_config.number(fields, "norm_epsilon"),
            activation=hf_config.activation(fields),
            tie_word_embeddings=hf_config.flag(fields, "tie_word_embeddings"),
            bias=hf_config.flag(fields, "use_bias"),
            sliding_window=hf_config.optional_integer(fields, "sliding_window"),
            rope=hf_rope.rope(fields),
        )


def param_specs(config: Config) -> Params:
    """Declare every weight."""
    return decoder_specs(
        config,
        attention=functools.partial(attention_specs, qkv_bias=config.bias, out_bias=config.bias),
        mlp=functools.partial(mlp_specs, up="c_fc", down="c_proj", bias=config.bias),
        norm=layer_norm_specs,
    )


def layers(
    params: Params, config: Config, x: Float[Array, "T E"], batch: Batch, kv_cache: KVCache, span: range
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run these layers: see `Family.layers`."""
    rotation = rotations(config.rope, batch.positions)
    norm = functools.partial(layer_norm, eps=config.norm_eps)
    scores = Scores(scale=config.head_dim**-0.5, sliding_window=config.sliding_window)
    attend = functools.partial(self_attention, rotation=rotation, scores=scores)
    return plain_layers(params, config, x, batch, kv_cache, span, attend=attend, norm=norm, feed_forward=mlp)


FAMILY = Family(Config=Config, param_specs=param_specs, layers=layers, doc=__doc__, own_layers="layer norms and biases")
