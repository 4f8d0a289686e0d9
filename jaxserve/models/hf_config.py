"""Reading the fields of a Hugging Face config.json, of transformers 4 and 5: every complaint names its field."""

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


def optional_integer(fields: Fields, name: str, default: int) -> int | None:
    """A positive integer, None where the field is null, `default` where it is missing."""
    return None if fields.get(name, default) is None else integer(fields, name, default)


def number(fields: Fields, name: str, default: float | None = None) -> float:
    """A positive number. A missing or null field takes the default, and is an error without one."""
    value = _get(fields, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"config.json: {name} must be a positive number, got {value!r}")
    return float(value)


def flag(fields: Fields, name: str, default: bool = False) -> bool:
    """A boolean."""
    value = _get(fields, name, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} must be true or false, got {value!r}")
    return value


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
    """`head_dim`, by default hidden_size / num_attention_heads. Raises CheckpointError if rotary pairs do not fit."""
    hidden_size, num_heads = integer(fields, "hidden_size"), integer(fields, "num_attention_heads")
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"config.json: hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({num_heads})"
        )
    size = integer(fields, "head_dim", hidden_size // num_heads)
    if size % 2:
        raise CheckpointError(f"config.json: head_dim must be even for rotary embedding, got {size}")
    return size


def activation(fields: Fields) -> str:
    """`hidden_act`, one of those that layers.mlp knows."""
    name = fields.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise CheckpointError(f"config.json: unknown hidden_act {name!r}; known are {', '.join(ACTIVATIONS)}")
    return name


def rope(fields: Fields) -> Rope:
    """Rotary embedding from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"config.json: rope_parameters or rope_scaling must be an object, got {given!r}")
    # What stands beside the object counts unless it is repeated inside.
    outer = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    parameters = {name: fields[name] for name in outer if name in fields} | given
    if number(parameters, "partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError("config.json: partial_rotary_factor other than 1 is not supported")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    match kind:
        case "default":
            scaling = None
        case "linear":
            scaling = LinearScaling(factor=number(parameters, "factor"))
        case "llama3":
            scaling = Llama3Scaling(
                factor=number(parameters, "factor"),
                low_freq_factor=number(parameters, "low_freq_factor"),
                high_freq_factor=number(parameters, "high_freq_factor"),
                original_max_position_embeddings=integer(parameters, "original_max_position_embeddings"),
            )
        case _:
            raise CheckpointError(f"config.json: unknown rope_type {kind!r}; known are default, linear, llama3")
    return Rope(head_dim=head_dim(fields), theta=number(parameters, "rope_theta", 10000.0), scaling=scaling)


def layer_windows(fields: Fields) -> tuple[int | None, ...]:
    """Each layer's sliding window as Qwen writes it: `use_sliding_window`, and `layer_types` or `max_window_layers`."""
    num_layers = integer(fields, "num_hidden_layers")
    window = optional_integer(fields, "sliding_window", 4096) if flag(fields, "use_sliding_window") else None
    kinds = fields.get("layer_types")
    if kinds is None:
        num_full = integer(fields, "max_window_layers", 28, minimum=0)
        kinds = ["full_attention" if index < num_full else "sliding_attention" for index in range(num_layers)]
    windows = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= windows.keys():
        raise CheckpointError(
            f"config.json: layer_types must name full_attention or sliding_attention for each of {num_layers} layers"
        )
    return tuple(windows[kind] for kind in kinds)


def _get(fields: Fields, name: str, default: Any) -> Any:
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json: {name} is missing")
    return value
