"""Qwen 3 Next (Qwen team 2025, github.com/QwenLM/Qwen3): three of four layers with the gated delta rule, the fourth
attends with gated outputs; experts, of which one is shared.

The layer that predicts further tokens, also that of Qwen 3.5, is loaded if it is to draft (`speculative/mtp.py`).
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.attention import HeadNorm, OutputGate
from jaxserve.layers.decoder import BiasedConfig
from jaxserve.layers.delta_net import DeltaHeads, DeltaNet
from jaxserve.layers.layer import Layer
from jaxserve.layers.mlp import FeedForward
from jaxserve.layers.moe import Experts, Routing
from jaxserve.layers.norm import Norm
from jaxserve.models import hf_config, hf_rope, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DELTA_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "head_dim": 256,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "full_attention_interval": 4
}  # fmt: skip
DEFAULTS: dict[str, Any] = DELTA_DEFAULTS | {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "decoder_sparse_step": 1, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True
}  # fmt: skip

DELTA_NET = "linear_attention"
"""The kind of layers with the gated delta rule in `layer_types`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig(BiasedConfig):
    """The shape of a model in which layers with the gated delta rule alternate with layers that attend."""

    attends: tuple[bool, ...]
    delta_heads: DeltaHeads

    @staticmethod
    def hybrid_fields(fields: dict[str, Any]) -> dict[str, Any]:
        """Read the fields of their own that all families with such layers have in common."""
        hf_config.require(fields, use_sliding_window=False)
        return {
            "attends": attending_layers(fields),
            "delta_heads": delta_heads(fields),
            "rope": hf_rope.rope(fields, partial_rotary_factor=0.25),
        }

    @property
    def norm(self) -> Norm:
        """The norm before each block; checkpoints store its gain less 1."""
        return Norm(eps=self.norm_eps, offset=1.0)

    @property
    def delta_net(self) -> DeltaNet:
        """The block with the gated delta rule."""
        return DeltaNet(heads=self.delta_heads, activation=self.activation, norm_eps=self.norm_eps)

    def hybrid(self, feed_forwards: tuple[FeedForward | Experts, ...]) -> tuple[Layer, ...]:
        """Return the layers with these feed-forwards."""
        attention = replace(self.attention, head_norm=HeadNorm(norm=self.norm), gate=OutputGate())
        attending, recurrent = (
            replace(self.layer, mixer=attention),
            replace(self.layer, mixer=self.delta_net, mixer_name="linear_attn"),
        )
        return tuple(
            replace(attending if attends else recurrent, feed_forward=feed_forward)
            for attends, feed_forward in zip(self.attends, feed_forwards, strict=True)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(HybridConfig):
    """The shape of one Qwen 3 Next; `intermediate_size` is that of layers without experts."""

    sparse_layers: tuple[bool, ...]
    expert_size: int
    shared_expert_size: int
    routing: Routing

    @property
    def experts(self) -> Experts:
        """The experts of a layer, with a gated one that is shared."""
        return mixture.experts_of(self, self.shared_expert_size, has_shared_gate=True)


def _read(fields: dict[str, Any]) -> Config:
    return read_config(
        Config,
        fields,
        **Config.hybrid_fields(fields),
        sparse_layers=hf_config.sparse_layers(fields),
        shared_expert_size=hf_config.integer(fields, "shared_expert_intermediate_size"),
        routing=mixture.read_routing(fields),
    )


def attending_layers(fields: dict[str, Any]) -> tuple[bool, ...]:
    """Return which layers attend, from `layer_types`; by default every one of number `full_attention_interval`."""
    num_layers, interval = (
        hf_config.integer(fields, name) for name in ("num_hidden_layers", "full_attention_interval")
    )
    default = ["full_attention" if (index + 1) % interval == 0 else DELTA_NET for index in range(num_layers)]
    return tuple(kind != DELTA_NET for kind in hf_config.layer_kinds(fields, ("full_attention", DELTA_NET), default))


def delta_heads(fields: dict[str, Any]) -> DeltaHeads:
    """Read the sizes of blocks with the gated delta rule. Raises CheckpointError if the value heads are not a multiple
    of the key heads.
    """
    hf_config.quotient(fields, "linear_num_value_heads", "linear_num_key_heads")
    return DeltaHeads(
        num_key_heads=hf_config.integer(fields, "linear_num_key_heads"),
        num_value_heads=hf_config.integer(fields, "linear_num_value_heads"),
        key_size=hf_config.integer(fields, "linear_key_head_dim"),
        value_size=hf_config.integer(fields, "linear_value_head_dim"),
        width=hf_config.integer(fields, "linear_conv_kernel_dim", minimum=2),
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    return config.hybrid(tuple(config.experts if sparse else config.feed_forward for sparse in config.sparse_layers))


FAMILY = Family(
    Config, DEFAULTS, _read, layers=layers, doc=__doc__, features=("QK norm", "gated attention", "gated delta rule")
)
