"""Trinity Nano, Mini and Large (Arcee 2025, arXiv:2602.17004): gated attention, rotated where there is a window, norms
before and after blocks, and experts chosen by sigmoid scores and a bias.
"""

import dataclasses
from typing import Any

from jaxtyping import Array, Float

from jaxserve.layers.activations import scaled
from jaxserve.layers.attention import OutputGate
from jaxserve.layers.batch import Batch
from jaxserve.layers.layer import SANDWICH_NORMS
from jaxserve.layers.names import ExpertNames, Names
from jaxserve.layers.params import Params
from jaxserve.models import family, hf_config, mixture
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 200192, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 1408,
    "num_attention_heads": 16, "head_dim": 128, "max_position_embeddings": 16384, "rms_norm_eps": 1e-05,
    "num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2, "num_dense_layers": 1, "route_scale": 1.0,
    "global_attn_every_n_layers": 4, "sliding_window": 1024, "mup_enabled": False
}  # fmt: skip

ALWAYS = {
    "score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1, "num_expert_groups": 1,
    "num_limited_groups": 1
}  # fmt: skip
"""Fields of published configs, and the only value of each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(mixture.Config):
    """The shape of one Trinity."""

    embedding_scale: float = 1.0


def _read(fields: dict[str, Any]) -> Config:
    hf_config.require(fields, **ALWAYS)
    window, period = hf_config.optional_integer(fields, "sliding_window"), "global_attn_every_n_layers"
    num_layers, num_dense = (
        hf_config.integer(fields, name, minimum=0) for name in ("num_hidden_layers", "num_dense_layers")
    )
    scale, has_scale = hf_config.number(fields, "route_scale"), hf_config.flag(fields, "mup_enabled")
    return read_config(
        Config,
        fields,
        **hf_config.biases(fields),
        sliding_windows=hf_config.periodic_windows(fields, window, period=hf_config.integer(fields, period)),
        sparse_layers=tuple(index >= num_dense for index in range(num_layers)),
        rotates_everywhere=False,
        norms=SANDWICH_NORMS,
        head_norm="shared",
        gate=OutputGate(),
        shared_expert_size=mixture.shared_size(fields, "num_shared_experts"),
        routing=mixture.read_routing(fields, scores="sigmoid", is_normalized=True, scale=scale),
        has_selection_bias=True,
        embedding_scale=hf_config.integer(fields, "hidden_size") ** 0.5 if has_scale else 1.0,
    )


def embed_tokens(params: Params, config: Config, batch: Batch) -> Float[Array, "T E"]:
    """Return rows of the embedding, scaled by the root of their size with `mup_enabled`."""
    return scaled(family.embed_tokens(params, config, batch), config.embedding_scale)


NAMES = Names(
    mlp_norm="pre_mlp_layernorm",
    mlp_post_norm="post_mlp_layernorm",
    gate="gate_proj",
    experts=ExpertNames(router="router.gate", selection_bias="expert_bias", shared="shared_experts"),
)
FAMILY = family.Family(
    Config,
    DEFAULTS,
    _read,
    layers=mixture.layers,
    names=NAMES,
    embed=embed_tokens,
    doc=__doc__,
    features=("QK norm", "gated attention"),
)
