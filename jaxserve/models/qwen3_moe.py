"""Qwen 3 with experts (Yang et al. 2025, arXiv:2505.09388): Qwen 3 with experts in all layers or some of them."""

import dataclasses
import functools
from typing import Any

from jaxserve.layers.attention import attention_specs
from jaxserve.layers.decoder import DecoderConfig, decoder, decoder_specs
from jaxserve.layers.mlp import gated_mlp_specs
from jaxserve.layers.moe import Routing, moe_specs
from jaxserve.layers.params import Params
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family

DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one Qwen 3 with experts; `intermediate_size` is that of layers without."""

    attention_bias: bool
    sliding_windows: tuple[int | None, ...]
    sparse_layers: tuple[bool, ...]
    expert_size: int
    routing: Routing

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS)
        return cls(
            **hf_config.as_llama(fields),
            attention_bias=hf_config.flag(fields, "attention_bias"),
            sliding_windows=_windows(fields),
            sparse_layers=hf_config.sparse_layers(fields),
            expert_size=hf_config.integer(fields, "moe_intermediate_size"),
            routing=Routing(
                num_experts=hf_config.num_experts(fields),
                num_experts_per_token=hf_config.integer(fields, "num_experts_per_tok"),
                is_normalized=hf_config.flag(fields, "norm_topk_prob"),
            ),
            rope=hf_rope.rope(fields),
        )


def _windows(fields: dict[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's window: the same for all layers, unlike Qwen 2 and Qwen 3 without experts."""
    is_used = hf_config.flag(fields, "use_sliding_window")
    window = hf_config.optional_integer(fields, "sliding_window") if is_used else None
    return (window,) * hf_config.integer(fields, "num_hidden_layers")


def param_specs(config: Config) -> Params:
    """Declare every weight."""
    dense = gated_mlp_specs
    sparse = functools.partial(moe_specs, expert_size=config.expert_size)
    return decoder_specs(
        config,
        attention=functools.partial(
            attention_specs, qkv_bias=config.attention_bias, out_bias=config.attention_bias, qk_norm=True
        ),
        mlp=[sparse if is_sparse else dense for is_sparse in config.sparse_layers],
    )


FAMILY = Family(Config=Config, param_specs=param_specs, layers=decoder, doc=__doc__, features=("QK norm",))
