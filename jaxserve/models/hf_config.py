"""Reading the fields of a Hugging Face config.json, of transformers 4 and 5: every complaint names its field."""

import math
from collections.abc import Sequence
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.latent_attention import LatentHeads
from jaxserve.layers.mlp import ACTIVATIONS
from jaxserve.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    PairScaling,
    Rope,
    Scaling,
    YarnScaling,
)

Fields = dict[str, Any]


def integer(fields: Fields, name: str, default: int | None = None, *, minimum: int = 1) -> int:
    """An integer. A missing or null field takes the default, and is an error without one."""
    value = _get(fields, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise CheckpointError(f"config.json: {name} must be an integer of at least {minimum}, got {value!r}")
    return value


def optional_integer(fields: Fields, name: str, default: int | None) -> int | None:
    """A positive integer, None where the field is null, `default` where it is missing."""
    return None if fields.get(name, default) is None else integer(fields, name, default)


def number(fields: Fields, name: str, default: float | None = None) -> float:
    """A positive number. A missing or null field takes the default, and is an error without one."""
    value = _get(fields, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"config.json: {name} must be a positive number, got {value!r}")
    return float(value)


def optional_number(fields: Fields, name: str, default: float | None = None) -> float | None:
    """A positive number, None where the field is null, `default` where it is missing."""
    value = fields.get(name, default)
    return None if value is None else number(fields, name, default)


def numbers(fields: Fields, name: str, length: int) -> tuple[float, ...]:
    """A list of so many positive numbers."""
    values = _get(fields, name, None)
    if not isinstance(values, list) or len(values) != length:
        raise CheckpointError(f"config.json: {name} must be a list of {length} numbers, got {values!r}")
    return tuple(number({name: value}, name) for value in values)


def flag(fields: Fields, name: str, default: bool = False) -> bool:
    """A boolean."""
    value = _get(fields, name, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} must be true or false, got {value!r}")
    return value


def require(fields: Fields, name: str, value: Any) -> None:
    """Refuse a switch that is not served: where the field is there and not null, it must have this value."""
    if fields.get(name) not in (None, value):
        raise CheckpointError(f"config.json: {name} {fields[name]!r} is not supported, only {value!r}")


def sizes(fields: Fields) -> dict[str, int]:
    """The sizes of a `layers.decoder.DecoderConfig` that have the same names everywhere, and no defaults."""
    return {
        "vocab_size": integer(fields, "vocab_size"),
        "hidden_size": integer(fields, "hidden_size"),
        "intermediate_size": integer(fields, "intermediate_size"),
        "num_layers": integer(fields, "num_hidden_layers"),
        "num_heads": integer(fields, "num_attention_heads"),
        "num_kv_heads": num_kv_heads(fields),
        "max_position_embeddings": integer(fields, "max_position_embeddings"),
    }


def as_llama(fields: Fields) -> dict[str, Any]:
    """All of a `layers.decoder.DecoderConfig` but `rope`, with the names and defaults of Llama and most relatives."""
    return sizes(fields) | {
        "head_dim": head_dim(fields),
        "norm_eps": number(fields, "rms_norm_eps"),
        "activation": activation(fields),
        "tie_word_embeddings": flag(fields, "tie_word_embeddings"),
    }


def num_kv_heads(fields: Fields) -> int:
    """`num_key_value_heads`, by default one a query head. Raises CheckpointError unless it divides the query heads."""
    num_heads = integer(fields, "num_attention_heads")
    num_kv = integer(fields, "num_key_value_heads", num_heads)
    if num_heads % num_kv:
        raise CheckpointError(
            f"config.json: num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv})"
        )
    return num_kv


def head_dim(fields: Fields) -> int:
    """`head_dim`, by default hidden_size / num_attention_heads. Raises CheckpointError where that is no integer."""
    if fields.get("head_dim") is not None:
        return integer(fields, "head_dim")
    return quotient(fields, "hidden_size", "num_attention_heads")


def quotient(fields: Fields, whole: str, parts: str) -> int:
    """One integer divided by another. Raises CheckpointError unless it is a multiple."""
    size, count = integer(fields, whole), integer(fields, parts)
    if size % count:
        raise CheckpointError(f"config.json: {whole} ({size}) is not a multiple of {parts} ({count})")
    return size // count


def activation(fields: Fields, name: str = "hidden_act", default: str = "silu") -> str:
    """One of the activations that layers.mlp knows."""
    value = fields.get(name, default)
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise CheckpointError(f"config.json: unknown {name} {value!r}; known are {', '.join(ACTIVATIONS)}")
    return value


def rope(
    fields: Fields, *, size: int | None = None, theta: float = 10000.0, partial_rotary_factor: float | None = None
) -> Rope:
    """Rotary embedding from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    `size` of a head is by default what `head_dim` reads, `theta` the family's default base, `partial_rotary_factor` its
    default share of a head that is rotated: None where the family rotates whole heads only. Raises CheckpointError for
    an unknown scaling, and if what is rotated does not fall into pairs.
    """
    parameters = rope_parameters(fields)
    if partial_rotary_factor is None and number(parameters, "partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError("config.json: partial_rotary_factor other than 1 is not supported")
    share = number(parameters, "partial_rotary_factor", partial_rotary_factor or 1.0)
    size = head_dim(fields) if size is None else size
    rotated = int(size * share)
    if rotated % 2 or not 0 < rotated <= size:
        given = f"{size}" if share == 1.0 else f"{size} times partial_rotary_factor {share}"
        raise CheckpointError(f"config.json: head_dim must be even for rotary embedding, got {given}")
    scaling = _scaling(fields, parameters, rotated)
    return Rope(head_dim=rotated, theta=number(parameters, "rope_theta", theta), scaling=scaling)


def rope_parameters(fields: Fields) -> Fields:
    """What a config.json says about rotary embedding, in whichever style, as one dictionary."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"config.json: rope_parameters or rope_scaling must be an object, got {given!r}")
    # What stands beside the object counts unless it is repeated inside.
    outer = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    return {name: fields[name] for name in outer if name in fields} | given


def _scaling(fields: Fields, parameters: Fields, rotated: int) -> Scaling | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=number(parameters, "factor"))
        case "llama3":
            return Llama3Scaling(
                factor=number(parameters, "factor"),
                low_freq_factor=number(parameters, "low_freq_factor"),
                high_freq_factor=number(parameters, "high_freq_factor"),
                original_max_position_embeddings=integer(parameters, "original_max_position_embeddings"),
            )
        case "frequency_factors":  # what GGUF files have in place of llama3's parameters
            return PairScaling(factors=numbers(parameters, "factors", rotated // 2))
        case "longrope":
            return _longrope(parameters, integer(fields, "max_position_embeddings"), rotated // 2)
        case "yarn":
            return _yarn(parameters, integer(fields, "max_position_embeddings"))
        case "dynamic" if rotated > 2:
            context = integer(fields, "max_position_embeddings")
            return DynamicScaling(
                factor=number(parameters, "factor"), original_max_position_embeddings=context, context=context
            )
        case "dynamic":
            raise CheckpointError("config.json: rope_type 'dynamic' needs more than 2 rotated dimensions of a head")
        case _:
            known = "default, linear, dynamic, yarn, longrope, llama3"
            raise CheckpointError(f"config.json: unknown rope_type {kind!r}; known are {known}")


def _longrope(parameters: Fields, context: int, num_pairs: int) -> LongRopeScaling:
    original = integer(parameters, "original_max_position_embeddings", minimum=2)
    stretch = number(parameters, "factor", context / original)
    default = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return LongRopeScaling(
        short_factors=numbers(parameters, "short_factor", num_pairs),
        long_factors=numbers(parameters, "long_factor", num_pairs),
        attention_factor=number(parameters, "attention_factor", default),
        original_max_position_embeddings=original,
        context=context,
    )


def _yarn(parameters: Fields, context: int) -> YarnScaling:
    original = integer(parameters, "original_max_position_embeddings", context)
    factor = number(parameters, "factor", context / original)
    beta_fast, beta_slow = number(parameters, "beta_fast", 32.0), number(parameters, "beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise CheckpointError(f"config.json: beta_fast ({beta_fast}) must be at least beta_slow ({beta_slow})")

    def length(name: str) -> float | None:  # of vectors, for a weight that may be missing or 0
        return 1.0 + 0.1 * number(parameters, name) * math.log(max(factor, 1.0)) if parameters.get(name) else None

    rotated, everywhere = length("mscale"), length("mscale_all_dim")
    default = 1.0 + 0.1 * math.log(max(factor, 1.0)) if rotated is None or everywhere is None else rotated / everywhere
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=number(parameters, "attention_factor", default),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        is_truncated=flag(parameters, "truncate", True),
        score_factor=1.0 if everywhere is None else everywhere**2,
    )


def windows_by_type(fields: Fields, window: int | None, default: Sequence[str]) -> tuple[int | None, ...]:
    """Each layer's sliding window: this one where `layer_types` has "sliding_attention", none at "full_attention"."""
    num_layers = integer(fields, "num_hidden_layers")
    kinds = fields.get("layer_types")
    kinds = list(default) if kinds is None else kinds
    known = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not known.issuperset(kinds):
        raise CheckpointError(
            f"config.json: layer_types must name full_attention or sliding_attention for each of {num_layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def layer_windows(fields: Fields) -> tuple[int | None, ...]:
    """Each layer's sliding window as Qwen writes it: `use_sliding_window`, and `layer_types` or `max_window_layers`."""
    num_layers = integer(fields, "num_hidden_layers")
    window = optional_integer(fields, "sliding_window", 4096) if flag(fields, "use_sliding_window") else None
    num_full = min(integer(fields, "max_window_layers", 28, minimum=0), num_layers)
    default = ["full_attention"] * num_full + ["sliding_attention"] * (num_layers - num_full)
    return windows_by_type(fields, window, default)


def num_experts(fields: Fields) -> int:
    """How many experts a sparse layer has, under any name. Raises CheckpointError if a token is to have more."""
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    name = next((name for name in names if fields.get(name) is not None), None)
    if name is None:
        raise CheckpointError(f"config.json: {', '.join(names)}: one of them must be there")
    count, per_token = integer(fields, name), integer(fields, "num_experts_per_tok")
    if per_token > count:
        raise CheckpointError(f"config.json: num_experts_per_tok ({per_token}) is more than {name} ({count})")
    return count


def sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Which layers have experts, as Qwen writes it: `decoder_sparse_step`, and `mlp_only_layers`, which have none."""
    step, dense = integer(fields, "decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list of integers, got {dense!r}")
    num_layers = integer(fields, "num_hidden_layers")
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(num_layers))


def sparse_layers_after_dense(fields: Fields, num_dense: int) -> tuple[bool, ...]:
    """Which layers have experts, as DeepSeek writes it: those from `first_k_dense_replace` (by default `num_dense`) on
    whose number is a multiple of `moe_layer_freq`.
    """
    first, step = integer(fields, "first_k_dense_replace", num_dense, minimum=0), integer(fields, "moe_layer_freq", 1)
    return tuple(index >= first and index % step == 0 for index in range(integer(fields, "num_hidden_layers")))


def expert_groups(fields: Fields, num_groups: int, num_chosen: int) -> tuple[int, int]:
    """`n_group` and `topk_group`: in how many groups experts come, and from how many of them a token's are chosen.

    The two numbers are the defaults. Raises CheckpointError if groups are not of one size, or hold too few experts.
    """
    count, num_groups = num_experts(fields), integer(fields, "n_group", num_groups)
    num_chosen, per_token = integer(fields, "topk_group", num_chosen), integer(fields, "num_experts_per_tok")
    if count % num_groups:
        raise CheckpointError(f"config.json: {count} experts cannot be in {num_groups} groups (n_group) of one size")
    if num_chosen > num_groups:
        raise CheckpointError(f"config.json: topk_group ({num_chosen}) is more than n_group ({num_groups})")
    if per_token > num_chosen * (count // num_groups):
        raise CheckpointError(
            f"config.json: num_experts_per_tok ({per_token}) is more than topk_group ({num_chosen}) groups of "
            f"{count // num_groups} hold"
        )
    return num_groups, num_chosen


def latent_heads(fields: Fields) -> LatentHeads:
    """The sizes of multi-head latent attention, as DeepSeek writes them. Raises CheckpointError for grouped heads."""
    num_heads = integer(fields, "num_attention_heads")
    require(fields, "num_key_value_heads", num_heads)
    return LatentHeads(
        num_heads=num_heads,
        query_rank=optional_integer(fields, "q_lora_rank", 1536),
        latent_size=integer(fields, "kv_lora_rank"),
        plain_size=integer(fields, "qk_nope_head_dim"),
        rotated_size=integer(fields, "qk_rope_head_dim"),
        value_size=integer(fields, "v_head_dim"),
    )


def _get(fields: Fields, name: str, default: Any) -> Any:
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json: {name} is missing")
    return value
