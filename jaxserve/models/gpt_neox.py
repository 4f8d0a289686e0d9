"""GPT-NeoX and Pythia (Black et al. 2022, arXiv:2204.06745): attention parallel to the feed-forward, partial
rotation.
"""

import dataclasses
import functools
from typing import Any

from jaxtyping import Array, Float

from jaxserve.layers.attention import attention_specs, self_attention
from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.decoder import DecoderConfig, Names, decoder_specs, parallel_block, plain_layers, sequential_block
from jaxserve.layers.mlp import mlp, mlp_specs
from jaxserve.layers.norm import layer_norm, layer_norm_specs
from jaxserve.layers.params import Params
from jaxserve.layers.rope import rotations
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "intermediate_size": 24576,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-05,
    "use_parallel_residual": True,
    "attention_bias": True,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""

ALIASES = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
"""Names of this family outside of rope_parameters, where transformers does not read the others'."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one GPT-NeoX."""

    attention_bias: bool
    use_parallel_residual: bool

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        known = {name: value for name, value in fields.items() if name not in ALIASES.values()}
        fields = hf_config.with_defaults(known, DEFAULTS, aliases=ALIASES)
        head_dim = hf_config.quotient(fields, "hidden_size", "num_attention_heads")
        return cls(
            **hf_config.sizes(fields),
            head_dim=head_dim,
            norm_eps=hf_config.number(fields, "layer_norm_eps"),
            activation=hf_config.activation(fields),
            tie_word_embeddings=hf_config.flag(fields, "tie_word_embeddings"),
            attention_bias=hf_config.flag(fields, "attention_bias"),
            use_parallel_residual=hf_config.flag(fields, "use_parallel_residual"),
            rope=hf_rope.rope(fields, size=head_dim, partial_rotary_factor=0.25),
        )


def param_specs(config: Config) -> Params:
    """Declare every weight."""
    return decoder_specs(
        config,
        attention=functools.partial(
            attention_specs,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            by_kv_head=True,
            inputs=("query_key_value",),
            output="dense",
        ),
        mlp=functools.partial(mlp_specs, up="dense_h_to_4h", down="dense_4h_to_h"),
        norm=layer_norm_specs,
        names=Names(
            embed="gpt_neox.embed_in",
            layers="gpt_neox.layers",
            attention="attention",
            norm="gpt_neox.final_layer_norm",
            lm_head="embed_out",
        ),
    )


def layers(
    params: Params, config: Config, x: Float[Array, "T E"], batch: Batch, kv_cache: KVCache, span: range
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run these layers: see `Family.layers`."""
    norm = functools.partial(layer_norm, eps=config.norm_eps)
    rotation = rotations(config.rope, batch.positions)
    attend = functools.partial(self_attention, rotation=rotation)
    arrange = parallel_block if config.use_parallel_residual else sequential_block
    return plain_layers(
        params, config, x, batch, kv_cache, span, attend=attend, norm=norm, feed_forward=mlp, arrange=arrange
    )


FAMILY = Family(Config=Config, param_specs=param_specs, layers=layers, doc=__doc__, own_layers="layer norms and biases")
