"""Command R (Cohere 2024, huggingface.co/CohereForAI/c4ai-command-r-v01): attention parallel to the feed-forward."""

import dataclasses
import functools
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from jaxserve.layers.attention import attention_specs, self_attention
from jaxserve.layers.batch import Batch, Kernels, KVCache
from jaxserve.layers.decoder import DecoderConfig, decoder_specs, parallel_block, plain_layers
from jaxserve.layers.norm import layer_norm, layer_norm_specs
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.layers.rope import half_split_order, rotations
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family, logits

DEFAULTS: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "logit_scale": 0.0625,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-05,
    "tie_word_embeddings": True,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one Command R."""

    attention_bias: bool
    use_qk_norm: bool
    logit_scale: float

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
            attention_bias=hf_config.flag(fields, "attention_bias"),
            use_qk_norm=hf_config.flag(fields, "use_qk_norm"),
            logit_scale=hf_config.number(fields, "logit_scale"),
            rope=hf_rope.rope(fields, theta=500000.0),
        )


def param_specs(config: Config) -> Params:
    """Declare every weight."""

    def head_norm(source: str, num_heads: int, axis: str) -> Params:
        D = config.head_dim
        rows = np.arange(num_heads * D).reshape(num_heads, D)[:, half_split_order(D, D)].ravel()
        return {
            "gain": ParamSpec(
                shape=(num_heads, D),
                axes=(axis, None),
                source=(f"{source}.weight",),
                rows=rows,
                init_scale=None,
            )
        }

    def attention(prefix: str, config: Config) -> Params:
        specs = attention_specs(
            prefix,
            config,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            num_interleaved=config.head_dim,
        )
        if config.use_qk_norm:
            specs["q_norm"] = head_norm(f"{prefix}.q_norm", config.num_heads, "heads")
            specs["k_norm"] = head_norm(f"{prefix}.k_norm", config.num_kv_heads, "kv_heads")
        return specs

    return decoder_specs(
        config,
        attention=attention,
        norm=functools.partial(layer_norm_specs, bias=False),
        norms={"attention_norm": "input_layernorm"},
    )


def layers(
    params: Params, config: Config, x: Float[Array, "T E"], batch: Batch, kv_cache: KVCache, span: range
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run these layers: see `Family.layers`."""
    rotation = rotations(config.rope, batch.positions)
    norm = functools.partial(layer_norm, eps=config.norm_eps)
    attend = functools.partial(self_attention, rotation=rotation, norm=norm)
    return plain_layers(params, config, x, batch, kv_cache, span, attend=attend, norm=norm, arrange=parallel_block)


def head(params: Params, config: Config, hidden: Float[Array, "N E"], kernels: Kernels) -> Float[Array, "N V"]:
    """Return scaled logits in float32."""
    return logits(params, config, hidden, kernels) * config.logit_scale


FAMILY = Family(
    Config=Config,
    param_specs=param_specs,
    layers=layers,
    head=head,
    doc=__doc__,
    features=("parallel blocks",),
    own_layers="attention and feed-forward side by side",
)
