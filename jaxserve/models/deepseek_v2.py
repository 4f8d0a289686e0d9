"""DeepSeek V2 (Liu et al. 2024, arXiv:2405.04434): latent attention, routed experts in groups, and shared experts.

Routing weights are never normalised by their sum: `norm_topk_prob`, which transformers ignores and DeepSeek's own code
does not, is true in no published checkpoint, and refused.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.attention import QueryScale
from jaxserve.layers.latent_attention import LatentAttention, LatentHeads
from jaxserve.layers.layer import Layer
from jaxserve.layers.mlp import FeedForward
from jaxserve.layers.moe import Routing
from jaxserve.layers.names import ExpertNames, Names
from jaxserve.layers.norm import Norm
from jaxserve.layers.rope import Rope, YarnScaling
from jaxserve.models import hf_config, hf_rope, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 102400, "intermediate_size": 11008, "max_position_embeddings": 2048, "first_k_dense_replace": 0,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "n_shared_experts": 2, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0, "topk_method": "greedy", "v_head_dim": 128, "moe_intermediate_size": 1407,
    "num_experts": 64
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """The shape of a decoder with latent attention and no experts, and the layer that follows from it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    latent_heads: LatentHeads
    max_position_embeddings: int
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    """Biases in layers without experts and in the shared experts."""
    is_interleaved: bool
    """True if the checkpoint stores the two dimensions of a rotated pair next to each other."""
    rope: Rope | None
    query_scale: QueryScale | None = None

    @property
    def feed_forward(self) -> FeedForward:
        """The feed-forward block."""
        return FeedForward(size=self.intermediate_size, activation=self.activation, has_bias=self.mlp_bias)

    @property
    def layer(self) -> Layer:
        """The layer."""
        attention = LatentAttention(
            heads=self.latent_heads, rope=self.rope, has_bias=self.attention_bias, query_scale=self.query_scale
        )
        return Layer(
            hidden_size=self.hidden_size, mixer=attention, feed_forward=self.feed_forward, norm=Norm(eps=self.norm_eps)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DenseConfig):
    """The shape of one DeepSeek V2 or V3; `intermediate_size` is that of layers without experts."""

    sparse_layers: tuple[bool, ...]
    expert_size: int
    shared_expert_size: int
    """Intermediate size of all shared experts of a layer together."""
    routing: Routing


def _read(fields: dict[str, Any]) -> Config:
    return read(
        fields, is_interleaved=True, sparse_layers=hf_config.sparse_layers_after_dense(fields), routing=_routing(fields)
    )


def read(fields: dict[str, Any], **own: Any) -> Config:
    """Read the Config of V2 or of one of its relatives, which read `own`."""
    shared_expert_size = mixture.shared_size(fields, "n_shared_experts", 0, minimum=0)
    return read_config(Config, fields, shared_expert_size=shared_expert_size, **read_latents(fields), **own)


def read_latents(fields: dict[str, Any]) -> dict[str, Any]:
    """Read the latent attention and its rotation."""
    heads = hf_config.latent_heads(fields)
    rope = hf_rope.rope(fields, size=heads.rotated_size)
    if rope.scaling is not None and not isinstance(rope.scaling, YarnScaling):  # transformers sharpens any of them
        hf_config.require(hf_rope.rope_object(fields), mscale_all_dim=0)
    return {"latent_heads": heads, "rope": rope}


def _routing(fields: dict[str, Any]) -> Routing:
    hf_config.require(fields, scoring_func="softmax", norm_topk_prob=False)
    method = fields.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(f"config.json: unknown topk_method {method!r}; known are greedy, group_limited_greedy")
    num_groups, num_chosen_groups = (1, 1) if method == "greedy" else hf_config.expert_groups(fields, 1, 1)
    return Routing(
        num_experts=hf_config.num_experts(fields),
        num_experts_per_token=hf_config.integer(fields, "num_experts_per_tok"),
        scale=hf_config.number(fields, "routed_scaling_factor"),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
    )


def layers(config: Config, *, has_selection_bias: bool = False) -> tuple[Layer, ...]:
    """Return the layers; V3 has a bias for choosing experts."""
    experts = mixture.experts_of(config, config.shared_expert_size, has_selection_bias=has_selection_bias)
    layer = config.layer
    return tuple(replace(layer, feed_forward=experts) if is_sparse else layer for is_sparse in config.sparse_layers)


def names(config: DenseConfig) -> Names:
    """Return the names of weights; V3 says how pairs are stored."""
    return Names(experts=ExpertNames(shared="shared_experts"), is_interleaved=config.is_interleaved)


FAMILY = Family(Config, DEFAULTS, _read, layers=layers, names=names, doc=__doc__)
