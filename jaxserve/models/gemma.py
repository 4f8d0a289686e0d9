"""Gemma (Gemma Team 2024, arXiv:2403.08295): Llama with scaled embeddings, GELU gates, and norm gains stored minus
1.
"""

from typing import Any

from jaxtyping import Array, Float

from jaxserve.layers.batch import Batch
from jaxserve.layers.decoder import BiasedConfig, DecoderConfig
from jaxserve.layers.embedding import embed
from jaxserve.layers.params import Params
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-06, "tie_word_embeddings": True
}  # fmt: skip


def _read(fields: dict[str, Any]) -> BiasedConfig:
    head_dim = hf_config.integer(fields, "head_dim")
    activation = hf_config.activation(fields)
    return read_config(
        BiasedConfig,
        fields,
        head_dim=head_dim,
        # The first releases say "gelu" and mean its approximation.
        activation="gelu_pytorch_tanh" if activation == "gelu" else activation,
        norm_offset=1.0,
        rope=hf_rope.rope(fields, size=head_dim),
    )


def embed_tokens(params: Params, config: DecoderConfig, batch: Batch) -> Float[Array, "T E"]:
    """Return rows of the embedding, scaled as their squares are in checkpoints of the family."""
    return embed(params["embed"], batch) * config.hidden_size**0.5


FAMILY = Family(BiasedConfig, DEFAULTS, _read, embed=embed_tokens, doc=__doc__)
