"""Ling 3 (Ling Team 2026, huggingface.co/inclusionAI/Ling-3.0-Flash): Kimi Linear's delta rule, latent attention with
positions and gated heads, and DeepSeek V3's experts.

The layer after the last one, which predicts further tokens, is not loaded.
"""

from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.attention import OutputGate
from jaxserve.layers.kimi_delta import KimiDelta
from jaxserve.layers.layer import Layer
from jaxserve.layers.names import ExpertNames, Names
from jaxserve.models import deepseek_v2, deepseek_v3, hf_config, kimi_linear, mixture
from jaxserve.models.family import Family
from jaxserve.models.qwen3_next import attending_layers
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 157184, "hidden_size": 2560, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 42, "num_key_value_heads": None, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8,
    "topk_group": 4, "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 262144,
    "num_experts": 512, "head_dim": 128, "short_conv_kernel_size": 4, "layer_group_size": 6, "kda_safe_gate": True,
    "kda_lower_bound": -5.0, "first_k_dense_replace": 2
}  # fmt: skip


def _read(fields: dict[str, Any]) -> kimi_linear.Config:
    hf_config.require(fields, tie_word_embeddings=False)
    period = hf_config.integer(fields, "layer_group_size")
    first = hf_config.integer(fields, "first_k_dense_replace", minimum=0)
    return read_config(
        kimi_linear.Config,
        fields,
        **deepseek_v2.read_latents(fields | {"rope_theta": fields.get("rope_theta", 6_000_000.0)}),
        shared_expert_size=mixture.shared_size(fields, "n_shared_experts", 0, minimum=0),
        mlp_bias=False,
        is_interleaved=True,
        sparse_layers=hf_config.sparse_layers_by_type(fields | {"first_k_dense_replace": None}, first),
        routing=deepseek_v3.routing(fields),
        attends=attending_layers(fields | {"full_attention_interval": period}),
        delta=KimiDelta(
            # Transformers writes these, and puts the size of rotated parts in place of head_dim.
            num_heads=hf_config.integer(fields, "linear_num_heads", hf_config.integer(fields, "num_attention_heads")),
            head_size=hf_config.integer(fields, "linear_head_dim", hf_config.integer(fields, "head_dim")),
            width=hf_config.integer(
                fields, "linear_conv_kernel_dim", hf_config.integer(fields, "short_conv_kernel_size"), minimum=2
            ),
            activation=hf_config.activation(fields),
            norm_eps=hf_config.number(fields, "rms_norm_eps"),
            has_low_rank=False,
            min_log_decay=_lower_bound(fields) if hf_config.flag(fields, "kda_safe_gate") else None,
        ),
    )


def _lower_bound(fields: dict[str, Any]) -> float:
    bound = fields["kda_lower_bound"]
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not -1e4 <= bound < 0:
        raise CheckpointError(
            f"config.json: kda_lower_bound must be a number from -10000 to below 0, got {bound!r:.100}"
        )
    return float(bound)


def layers(config: kimi_linear.Config) -> tuple[Layer, ...]:
    """Return the layers."""
    gate = OutputGate(is_per_head=True)
    return tuple(
        replace(layer, mixer=replace(layer.mixer, gate=gate)) if attends else layer  # pyright: ignore[reportArgumentType]
        for layer, attends in zip(kimi_linear.layers(config), config.attends, strict=True)
    )


NAMES = Names(
    embed="model.word_embeddings",
    attention="attention",
    out="dense",
    gate="g_proj",
    is_interleaved=True,
    experts=ExpertNames(selection_bias="gate.expert_bias", shared="shared_experts"),
)
FAMILY = Family(
    kimi_linear.Config,
    DEFAULTS,
    _read,
    aliases=kimi_linear.ALIASES,
    layers=layers,
    names=NAMES,
    doc=__doc__,
    features=("delta rule with decays by channel", "gated attention"),
)
