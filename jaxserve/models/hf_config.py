"""Read the fields of a Hugging Face config.json, of transformers 4 and 5; every error names its field."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.activations import ACTIVATIONS
from jaxserve.layers.latent_attention import LatentHeads
from jaxserve.loading.bounds import MAX_EXPERTS_OF_ALL_LAYERS, MAX_FLOAT, MAX_INTEGER, MAXIMA, MIN_FLOAT

Fields = dict[str, Any]

NULL_SAYS_SOMETHING = {
    *("attn_logit_softcapping", "final_logit_softcapping", "head_dim", "n_shared_experts", "num_key_value_heads"),
    *("attention_chunk_size", "attention_value_scale", "mamba_d_ssm", "mamba_norm_before_gate", "moe_renormalize"),
    *("norm_topk_prob", "q_lora_rank", "rope_interleave", "sliding_window"),
}
"""Fields in which null is a value: the feature is absent, a flag is false, or the value follows from others."""


def with_defaults(
    fields: Fields,
    defaults: Fields,
    *,
    old_names: Mapping[str, str] = MappingProxyType({}),
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> Fields:
    """Fill in a family's `defaults` for fields that are missing, or null where null has no meaning.

    `old_names` are alternative names of fields, used if the field itself is missing; `aliases` count even if it is not,
    as those of transformers do. Raises CheckpointError for fields
    that would change what any family computes, but are not supported.
    """
    for name in ("per_layer_config", "pruned_heads"):
        if fields.get(name):
            raise CheckpointError(f"config.json: {name} {fields[name]!r:.100} is not supported")
    require(fields, is_encoder_decoder=False, add_cross_attention=False)
    if fields.get("is_causal", True) is not True:
        raise CheckpointError(f"config.json: is_causal {fields['is_causal']!r} is not supported, only True")
    given = {name: value for name, value in fields.items() if value is not None or name in NULL_SAYS_SOMETHING}
    renamed = {new: given[old] for old, new in old_names.items() if old in given}
    return defaults | renamed | given | {new: given[alias] for alias, new in aliases.items() if alias in given}


def integer(fields: Fields, name: str, default: int | None = None, *, minimum: int = 1) -> int:
    """Read an integer between `minimum` and the field's maximum. A missing or null field takes the default; without one
    it is an error.
    """
    value, maximum = _get(fields, name, default), MAXIMA.get(name, MAX_INTEGER)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise CheckpointError(f"config.json: {name} must be an integer of at least {minimum}, got {value!r:.100}")
    if value > maximum:
        raise CheckpointError(f"config.json: {name} must be at most {maximum}, got {value!r:.100}")
    return value


def optional_integer(fields: Fields, name: str) -> int | None:
    """Read a positive integer, None if the field is null or missing."""
    return None if fields.get(name) is None else integer(fields, name)


def number(fields: Fields, name: str, default: float | None = None) -> float:
    """Read a number between MIN_FLOAT and the field's maximum. A missing or null field takes the default; without one
    it is an error.
    """
    value, maximum = _get(fields, name, default), MAXIMA.get(name, MAX_FLOAT)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= MIN_FLOAT:
        raise CheckpointError(f"config.json: {name} must be a positive number, got {value!r:.100}")
    if value > maximum:
        raise CheckpointError(f"config.json: {name} must be at most {maximum:g}, got {value!r:.100}")
    return float(value)


def optional_number(fields: Fields, name: str) -> float | None:
    """Read a positive number, None if the field is null or missing."""
    return None if fields.get(name) is None else number(fields, name)


def numbers(fields: Fields, name: str, length: int) -> tuple[float, ...]:
    """Read a list of `length` positive numbers."""
    values = _get(fields, name, None)
    if not isinstance(values, list) or len(values) != length:
        raise CheckpointError(f"config.json: {name} must be a list of {length} numbers, got {values!r:.100}")
    return tuple(number({name: value}, name) for value in values)


def flag(fields: Fields, name: str, default: bool = False) -> bool:
    """Read a boolean."""
    value = _get(fields, name, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} must be true or false, got {value!r}")
    return value


def require(fields: Fields, **supported: Any) -> None:
    """Refuse unsupported options: a field of such a name that is present and not null must have this value."""
    for name, value in supported.items():
        if fields.get(name) not in (None, value):
            raise CheckpointError(f"config.json: {name} {fields[name]!r} is not supported, only {value!r}")


def num_kv_heads(fields: Fields, name: str = "num_key_value_heads") -> int:
    """Read the number of KV heads, by default one per query head. Raises CheckpointError unless it divides the query
    heads.
    """
    num_heads = integer(fields, "num_attention_heads")
    num_kv = integer(fields, name, num_heads)
    if num_heads % num_kv:
        raise CheckpointError(f"config.json: num_attention_heads ({num_heads}) is not a multiple of {name} ({num_kv})")
    return num_kv


def head_dim(fields: Fields) -> int:
    """Read `head_dim`, by default hidden_size / num_attention_heads. Raises CheckpointError if that is not an
    integer.
    """
    if fields.get("head_dim") is not None:
        return integer(fields, "head_dim")
    return quotient(fields, "hidden_size", "num_attention_heads")


def quotient(fields: Fields, whole: str, parts: str) -> int:
    """Divide one integer field by another. Raises CheckpointError unless it is a multiple."""
    size, count = integer(fields, whole), integer(fields, parts)
    if size % count:
        raise CheckpointError(f"config.json: {whole} ({size}) is not a multiple of {parts} ({count})")
    return size // count


def activation(fields: Fields, name: str = "hidden_act") -> str:
    """Read the name of one of the activations of layers.mlp."""
    value = _get(fields, name, None)
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise CheckpointError(f"config.json: unknown {name} {value!r:.100}; known are {', '.join(ACTIVATIONS)}")
    return value


def biases(fields: Fields, name: str = "attention_bias") -> dict[str, Any]:
    """Read a flag that stands for biases of all projections of the attention."""
    return dict.fromkeys(("qkv_bias", "out_bias"), flag(fields, name))


def plain_blocks(*, has_biases: bool = True) -> dict[str, Any]:
    """Return the fields of blocks like those of GPT-2: layer norms, no gates, and biases everywhere or nowhere."""
    return {"norm_kind": "layer", "is_gated": False, **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), has_biases)}


def rotating_layers(fields: Fields) -> tuple[bool, ...]:
    """Return which layers rotate: `no_rope_layers` says so in spite of its name, by default all but every one of number
    `no_rope_layer_interval`.
    """
    num_layers = integer(fields, "num_hidden_layers")
    interval, flags = integer(fields, "no_rope_layer_interval", 4), fields.get("no_rope_layers")
    if flags is None:
        flags = [int((index + 1) % interval != 0) for index in range(num_layers)]
    if not isinstance(flags, list) or len(flags) < num_layers or not all(flag in (0, 1) for flag in flags):
        raise CheckpointError(f"config.json: no_rope_layers must have 0 or 1 for each of {num_layers} layers")
    return tuple(map(bool, flags[:num_layers]))


def layer_kinds(
    fields: Fields, known: tuple[str, ...], default: Sequence[str], *, name: str = "layer_types"
) -> tuple[str, ...]:
    """Read the kind of each layer from `layer_types`, or a field of another `name`; `default` if that is missing or
    null. Raises CheckpointError unless all are `known`.
    """
    num_layers, kinds = integer(fields, "num_hidden_layers"), fields.get(name)
    kinds = list(default) if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in known for kind in kinds):
        raise CheckpointError(f"config.json: {name} must name {' or '.join(known)} for each of {num_layers} layers")
    return tuple(kinds)


def windows_by_type(
    fields: Fields,
    window: int | None,
    default: Sequence[str],
    *,
    kind: str = "sliding_attention",
    name: str = "sliding_window",
) -> tuple[int | None, ...]:
    """Return each layer's sliding window: `window` where `layer_types` has `kind`, None at "full_attention". Raises
    CheckpointError if some have `kind` and there is no `window`, as transformers does; `name` is the window's field.

    A window of 0, which `optional_integer` refuses, has no one meaning: with it transformers attends to all tokens in
    its flash attention, and averages all values, also of later tokens, elsewhere.
    """
    kinds = layer_kinds(fields, ("full_attention", kind), default)
    if window is None and kind in kinds:
        reason = f"{name} is null" if fields.get(name) is None else "use_sliding_window is false"
        raise CheckpointError(f"config.json: layer_types has {kind}, but {reason}")
    return tuple(window if each == kind else None for each in kinds)


def periodic_windows(fields: Fields, window: int | None, *, period: int) -> tuple[int | None, ...]:
    """Return each layer's sliding window. Without `layer_types`, all but every `period`-th layer have one."""
    num_layers = integer(fields, "num_hidden_layers")
    default = ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(num_layers)]
    return windows_by_type(fields, window, default)


def used_window(fields: Fields) -> int | None:
    """Return `sliding_window`, None unless `use_sliding_window` is true."""
    return optional_integer(fields, "sliding_window") if flag(fields, "use_sliding_window") else None


def layer_windows(fields: Fields) -> tuple[int | None, ...]:
    """Return each layer's sliding window from Qwen's fields: `use_sliding_window`, and `layer_types` or
    `max_window_layers`.
    """
    num_layers, window = integer(fields, "num_hidden_layers"), used_window(fields)
    num_full = num_layers if window is None else min(integer(fields, "max_window_layers", minimum=0), num_layers)
    default = ["full_attention"] * num_full + ["sliding_attention"] * (num_layers - num_full)
    return windows_by_type(fields, window, default)


def kv_sources(fields: Fields, windows: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return the layer whose keys and values each layer reads, None for its own: the last `num_kv_shared_layers` read
    those of the last layer before them of their kind, with a window or without. Raises CheckpointError if there is
    none.
    """
    first = len(windows) - integer(fields, "num_kv_shared_layers", minimum=0)
    is_full = [window is None for window in windows]
    last = {kind: layer for layer, kind in enumerate(is_full[: max(first, 0)])}
    if missing := set(is_full) - last.keys():
        kind = "full_attention" if True in missing else "sliding_attention"
        raise CheckpointError(f"config.json: num_kv_shared_layers leaves no layer of {kind} whose keys others may read")
    return tuple(None if layer < first else last[kind] for layer, kind in enumerate(is_full))


def num_experts(fields: Fields, *, per_token_name: str = "num_experts_per_tok") -> int:
    """Return the number of experts of a sparse layer, under any name. Raises CheckpointError if a token needs more than
    that; `per_token_name` is the field that says how many it needs.
    """
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    name = next((name for name in names if fields.get(name) is not None), None)
    if name is None:
        raise CheckpointError(f"config.json: {', '.join(names)}: one of them must be there")
    count, per_token = integer(fields, name), integer(fields, per_token_name)
    if count * integer(fields, "num_hidden_layers") > MAX_EXPERTS_OF_ALL_LAYERS:
        raise CheckpointError(
            f"config.json: {name} ({count}) times num_hidden_layers must be at most {MAX_EXPERTS_OF_ALL_LAYERS}"
        )
    if per_token > count:
        raise CheckpointError(f"config.json: {per_token_name} ({per_token}) is more than {name} ({count})")
    return count


def sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Return which layers have experts, from Qwen's fields: `decoder_sparse_step`, and `mlp_only_layers`, which have
    none.
    """
    step, dense = integer(fields, "decoder_sparse_step"), fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list of integers, got {dense!r:.100}")
    num_layers, dense = integer(fields, "num_hidden_layers"), set(dense)
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(num_layers))


def sparse_layers_after_dense(fields: Fields) -> tuple[bool, ...]:
    """Return which layers have experts, from DeepSeek's fields: `first_k_dense_replace`, `moe_layer_freq`."""
    first, step = integer(fields, "first_k_dense_replace", minimum=0), integer(fields, "moe_layer_freq", 1)
    return tuple(index >= first and index % step == 0 for index in range(integer(fields, "num_hidden_layers")))


def sparse_layers_by_type(fields: Fields, first: int = 1) -> tuple[bool, ...]:
    """Return which layers have experts, from `mlp_layer_types`; by default all but the first ones, whose number is
    `first_k_dense_replace` or `first`. Raises CheckpointError if the two contradict each other.
    """
    first = integer(fields, "first_k_dense_replace", first, minimum=0)
    if fields.get("mlp_layer_types") is None:
        return tuple(index >= first for index in range(integer(fields, "num_hidden_layers")))
    is_sparse = tuple(kind == "sparse" for kind in layer_kinds(fields, ("dense", "sparse"), (), name="mlp_layer_types"))
    contradicts = any(is_sparse[:first]) or not all(is_sparse[first:])
    if fields.get("first_k_dense_replace") is not None and contradicts:
        raise CheckpointError(f"config.json: first_k_dense_replace {first} contradicts mlp_layer_types")
    return is_sparse


def expert_groups(fields: Fields, num_groups: int, num_chosen: int) -> tuple[int, int]:
    """Read `n_group` and `topk_group`: the number of groups of experts, and from how many of them a token's experts are
    chosen.

    The two numbers are the defaults. Raises CheckpointError if groups are not equally large, or hold too few experts.
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
    """Read the sizes of multi-head latent attention from DeepSeek's fields. Raises CheckpointError for grouped
    heads.
    """
    num_heads = integer(fields, "num_attention_heads")
    require(fields, num_key_value_heads=num_heads)
    return LatentHeads(
        num_heads=num_heads,
        query_rank=optional_integer(fields, "q_lora_rank"),
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
