"""Falcon (Almazrouei et al. 2023, arXiv:2311.16867): one KV head or a few, attention parallel to the feed-forward.

There are three kinds: Falcon 7B with one KV head; 40B, 180B and Falcon 2 with grouped heads and either a norm per block
or one for both; Falcon-RW with a KV head per query head, ALiBi and sequential blocks.
"""

import dataclasses
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.layers.alibi import alibi_slopes
from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import ONE_NORM, PRE_NORMS, Arrangement
from jaxserve.layers.names import Names
from jaxserve.models import bloom, hf_config, hf_rope
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
    "layer_norm_epsilon": 1e-05, "multi_query": True, "parallel_attn": True, "max_position_embeddings": 2048,
    "activation": "gelu", "tie_word_embeddings": True
}  # fmt: skip

OLD_NAMES = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one Falcon."""

    use_parallel_residual: bool
    num_block_norms: int
    """Norms per layer: parallel blocks have one in common, or one each."""


def _read(fields: dict[str, Any]) -> Config:
    hidden_size = hf_config.integer(fields, "hidden_size")
    num_heads = hf_config.integer(fields, "num_attention_heads")
    head_dim = hf_config.quotient(fields, "hidden_size", "num_attention_heads")
    is_new = hf_config.flag(fields, "new_decoder_architecture")
    is_parallel = is_new or hf_config.flag(fields, "parallel_attn")
    has_alibi = hf_config.flag(fields, "alibi")
    num_block_norms = _num_block_norms(fields, is_new=is_new) if is_parallel else 2
    return read_config(
        Config,
        fields,
        **hf_config.plain_blocks(has_biases=hf_config.flag(fields, "bias")),
        intermediate_size=hf_config.integer(fields, "ffn_hidden_size", 4 * hidden_size),
        num_kv_heads=_num_kv_heads(fields, num_heads, is_new=is_new),
        head_dim=head_dim,
        norm_eps=hf_config.number(fields, "layer_norm_epsilon"),
        activation=hf_config.activation(fields, "activation"),
        use_parallel_residual=is_parallel,
        num_block_norms=num_block_norms,
        norms=PRE_NORMS if num_block_norms == 2 else ONE_NORM,
        arrangement=Arrangement.PARALLEL if is_parallel else Arrangement.SEQUENTIAL,
        rope=None if has_alibi else hf_rope.rope(fields, size=head_dim),
        alibi_slopes=_slopes(num_heads, head_dim) if has_alibi else None,
    )


def _num_kv_heads(fields: dict[str, Any], num_heads: int, *, is_new: bool) -> int:
    """Read the number of KV heads, which only the new architecture can choose; otherwise the field is ignored."""
    if not is_new:
        return 1 if hf_config.flag(fields, "multi_query") else num_heads
    return hf_config.num_kv_heads(fields, "num_kv_heads")


def _num_block_norms(fields: dict[str, Any], *, is_new: bool) -> int:
    count = hf_config.integer(fields, "num_ln_in_parallel_attn", 2 if is_new else 1)
    if count > (2 if is_new else 1):
        raise CheckpointError(
            "config.json: num_ln_in_parallel_attn must be 1, or 2 with new_decoder_architecture, "
            f"got {count} with {is_new}"
        )
    return count


def _slopes(num_heads: int, head_dim: int) -> tuple[float, ...]:
    """Return ALiBi slopes in bfloat16 whatever the served dtype, scaled like the scores.

    transformers also rounds the products of slopes and positions, which changes scores far back by up to 0.4%.
    """
    return tuple(float(slope) * head_dim**-0.5 for slope in np.asarray(alibi_slopes(num_heads), jnp.bfloat16))


def names(config: Config) -> Names:
    """Return the names of weights, of which norms depend on the architecture."""
    has_two = config.use_parallel_residual and config.num_block_norms == 2
    return replace(bloom.NAMES, attention_norm="ln_attn", mlp_norm="ln_mlp") if has_two else bloom.NAMES


FAMILY = Family(Config, DEFAULTS, _read, old_names=OLD_NAMES, names=names, doc=__doc__, features=("alibi_slopes",))
