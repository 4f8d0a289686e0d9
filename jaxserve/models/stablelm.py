"""StableLM 3B and 2 (Bellagente et al. 2024, arXiv:2402.17834): Llama with layer norms and partial rotation."""

import dataclasses
import functools
from typing import Any

from jaxtyping import Array, Float

from jaxserve.layers.attention import attention_specs, self_attention
from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.decoder import (
    PRE_NORMS,
    DecoderConfig,
    decoder_specs,
    parallel_block,
    plain_layers,
    sequential_block,
)
from jaxserve.layers.norm import layer_norm, layer_norm_specs
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.layers.rope import rotations
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50304,
    "intermediate_size": 6912,
    "hidden_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-05,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one StableLM."""

    qkv_bias: bool
    qk_layernorm: bool
    use_parallel_residual: bool

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS)
        head_dim = hf_config.quotient(fields, "hidden_size", "num_attention_heads")
        return cls(
            **hf_config.sizes(fields),
            head_dim=head_dim,
            norm_eps=hf_config.number(fields, "layer_norm_eps"),
            activation=hf_config.activation(fields),
            tie_word_embeddings=hf_config.flag(fields, "tie_word_embeddings"),
            qkv_bias=hf_config.flag(fields, "use_qkv_bias"),
            qk_layernorm=hf_config.flag(fields, "qk_layernorm"),
            use_parallel_residual=hf_config.flag(fields, "use_parallel_residual"),
            rope=hf_rope.rope(fields, size=head_dim, partial_rotary_factor=0.25),
        )


def param_specs(config: Config) -> Params:
    """Declare every weight."""

    def attention(prefix: str, config: Config) -> Params:
        H, K = config.num_heads, config.num_kv_heads
        specs = attention_specs(prefix, config, qkv_bias=config.qkv_bias)
        if config.qk_layernorm:
            specs["q_norm"] = _head_norm_specs(f"{prefix}.q_layernorm", H, config.head_dim, axis="heads")
            specs["k_norm"] = _head_norm_specs(f"{prefix}.k_layernorm", K, config.head_dim, axis="kv_heads")
        return specs

    return decoder_specs(
        config,
        attention=attention,
        norm=layer_norm_specs,
        norms={"attention_norm": "input_layernorm"} if config.use_parallel_residual else PRE_NORMS,
    )


def _head_norm_specs(source: str, num_heads: int, head_dim: int, *, axis: str) -> Params:
    """Declare layer norms with a gain per head, each a tensor of its own in the checkpoint."""
    gain = ParamSpec(
        shape=(num_heads, head_dim),
        axes=(axis, None),
        source=tuple(f"{source}.norms.{index}.weight" for index in range(num_heads)),
        source_shapes=((head_dim,),) * num_heads,
        init_scale=None,
    )
    return {"gain": gain}


def layers(
    params: Params, config: Config, x: Float[Array, "T E"], batch: Batch, kv_cache: KVCache, span: range
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run these layers: see `Family.layers`."""
    norm = functools.partial(layer_norm, eps=config.norm_eps)
    rotation = rotations(config.rope, batch.positions)
    attend = functools.partial(self_attention, rotation=rotation, norm=norm)
    arrange = parallel_block if config.use_parallel_residual else sequential_block
    return plain_layers(params, config, x, batch, kv_cache, span, attend=attend, norm=norm, arrange=arrange)


FAMILY = Family(Config=Config, param_specs=param_specs, layers=layers, doc=__doc__, own_layers="layer norms")
