"""Reading the fields of a Hugging Face config.json, of transformers 4 and 5: every complaint names its field."""

from collections.abc import Sequence
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.mlp import ACTIVATIONS
from jaxserve.layers.rope import LinearScaling, Llama3Scaling, Rope

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
    if value not in ACTIVATIONS:
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
    return Rope(head_dim=rotated, theta=number(parameters, "rope_theta", theta), scaling=_scaling(parameters))


def rope_parameters(fields: Fields) -> Fields:
    """What a config.json says about rotary embedding, in whichever style, as one dictionary."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"config.json: rope_parameters or rope_scaling must be an object, got {given!r}")
    # What stands beside the object counts unless it is repeated inside.
    outer = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    return {name: fields[name] for name in outer if name in fields} | given


def _scaling(parameters: Fields) -> LinearScaling | Llama3Scaling | None:
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
        case _:
            raise CheckpointError(f"config.json: unknown rope_type {kind!r}; known are default, linear, llama3")


def layer_types(fields: Fields, default: Sequence[str]) -> tuple[str, ...]:
    """`layer_types`, an entry a layer: "full_attention" or "sliding_attention"."""
    num_layers = integer(fields, "num_hidden_layers")
    kinds = fields.get("layer_types")
    kinds = list(default) if kinds is None else kinds
    known = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not known.issuperset(kinds):
        raise CheckpointError(
            f"config.json: layer_types must name full_attention or sliding_attention for each of {num_layers} layers"
        )
    return tuple(kinds)


def layer_windows(fields: Fields) -> tuple[int | None, ...]:
    """Each layer's sliding window as Qwen writes it: `use_sliding_window`, and `layer_types` or `max_window_layers`."""
    num_layers = integer(fields, "num_hidden_layers")
    window = optional_integer(fields, "sliding_window", 4096) if flag(fields, "use_sliding_window") else None
    num_full = min(integer(fields, "max_window_layers", 28, minimum=0), num_layers)
    default = ["full_attention"] * num_full + ["sliding_attention"] * (num_layers - num_full)
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types(fields, default))


def _get(fields: Fields, name: str, default: Any) -> Any:
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json: {name} is missing")
    return value
