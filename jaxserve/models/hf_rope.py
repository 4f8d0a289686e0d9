"""Read rotary embedding from a Hugging Face config.json, in the formats of transformers 4 and 5."""

import math

from jaxserve.errors import CheckpointError
from jaxserve.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    PairScaling,
    ProportionalScaling,
    Rope,
    Scaling,
    YarnScaling,
)
from jaxserve.models.hf_config import Fields, flag, head_dim, integer, number, numbers, require

_FIELDS = {
    *("rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "factors"),
    *("finetuned", "mrope_section", "mrope_interleaved"),  # do not affect positions of text
}
"""Fields that a rotary embedding object may have; which of them matter depends on its `rope_type`."""


def rope(
    fields: Fields,
    *,
    size: int | None = None,
    theta: float = 10000.0,
    partial_rotary_factor: float | None = None,
    is_context_stretched: bool = False,
) -> Rope:
    """Read rotary embedding from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    `size` of a head is by default `head_dim`; `theta` is the family's default base; `partial_rotary_factor` its default
    fraction of a head that is rotated, None if the family always rotates whole heads. `is_context_stretched` means that
    max_position_embeddings is the context after linear scaling, not the original one. Raises CheckpointError for an
    unknown scaling, and if the rotated dimensions are not even in number.
    """
    parameters = rope_parameters(fields)
    is_proportional = partial_rotary_factor is None and _kind(parameters) == "proportional"
    if (
        partial_rotary_factor is None
        and not is_proportional
        and number(parameters, "partial_rotary_factor", 1.0) != 1.0
    ):
        raise CheckpointError("config.json: partial_rotary_factor other than 1 is not supported")
    fraction = number(parameters, "partial_rotary_factor", partial_rotary_factor or 1.0)
    size = head_dim(fields) if size is None else size
    rotated = size if is_proportional else int(size * fraction)
    if rotated % 2 or not 0 < rotated <= size:
        given = f"{size}" if fraction == 1.0 else f"{size} times partial_rotary_factor {fraction} ({rotated})"
        part = "head_dim" if fraction == 1.0 else "the rotated part of head_dim"
        raise CheckpointError(f"config.json: {part} must be even for rotary embedding, got {given}")
    theta = number(parameters, "rope_theta", theta)
    if theta <= 1.0:
        raise CheckpointError(f"config.json: rope_theta must be greater than 1, got {theta:g}")
    if is_proportional:
        num_pairs = int(fraction * size // 2)
        if not 0 < num_pairs <= size // 2:
            raise CheckpointError(
                f"config.json: partial_rotary_factor {fraction:g} of a head of {size} is not possible"
            )
        scaling = ProportionalScaling(num_pairs=num_pairs, factor=number(parameters, "factor", 1.0))
        return Rope(head_dim=size, theta=theta, scaling=scaling)
    scaling = _scaling(fields, parameters, rotated, is_context_stretched=is_context_stretched)
    return Rope(head_dim=rotated, theta=theta, scaling=scaling)


def ropes_by_type(
    fields: Fields, *, size: int, theta: float, local_theta: object, is_context_stretched: bool = False
) -> tuple[Rope, Rope]:
    """Read the rotary embedding of full layers, and of those with a window.

    Before transformers 5 the usual fields described the former, and the latter had a base only, `local_theta` (None:
    that of most models). `theta` is the default base of full layers; the other arguments are those of `rope`.
    """
    kinds, scaling = fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}
    if not isinstance(kinds, dict) or not {"full_attention", "sliding_attention"}.issuperset(kinds):
        raise CheckpointError(
            "config.json: rope_parameters must be an object of full_attention and sliding_attention, got "
            f"{kinds!r:.100}"
        )
    for name, kind in kinds.items():
        if not isinstance(kind or {}, dict):
            raise CheckpointError(f"config.json: rope_parameters.{name} must be an object, got {kind!r:.100}")
    if not isinstance(scaling, dict):
        raise CheckpointError(f"config.json: rope_scaling must be an object, got {scaling!r:.100}")
    if "type" in scaling and "rope_type" not in scaling:  # which transformers reads over in these families
        raise CheckpointError(f"config.json: rope_scaling must have rope_type, got type {scaling['type']!r:.100}")
    # An original context outside of the objects is not read.
    fields = {name: value for name, value in fields.items() if name != "original_max_position_embeddings"}
    everywhere = {"rope_parameters": of_layer_type((kinds.get("full_attention") or {}) | scaling), "rope_scaling": None}
    local = {
        "rope_parameters": of_layer_type(kinds.get("sliding_attention") or {}),
        "rope_scaling": None,
        "rope_theta": local_theta,
    }
    return (
        rope(fields | everywhere, size=size, theta=theta, is_context_stretched=is_context_stretched),
        rope(fields | local, size=size),
    )


def ropes_of_objects(
    fields: Fields, default: Fields, *, sizes: tuple[int, int], partial_rotary_factor: float | None = None
) -> tuple[Rope, Rope]:
    """Read the rotary embedding of full layers, and of those with a window, from objects in `rope_parameters`.

    `sizes` are those of their heads; `default` is what a config says that has no `rope_parameters`. The last argument
    is that of `rope`. Raises CheckpointError unless there is an object for each.
    """
    kinds = default if fields.get("rope_parameters") is None else fields["rope_parameters"]
    is_by_type = isinstance(kinds, dict) and kinds.keys() == default.keys()
    if not is_by_type or not all(isinstance(kind, dict) for kind in kinds.values()):
        raise CheckpointError(
            f"config.json: rope_parameters must have an object for each of {', '.join(default)}, got {kinds!r:.100}"
        )
    name = "partial_rotary_factor"
    if partial_rotary_factor is not None and not all(name in kind for kind in kinds.values()):
        require(fields, partial_rotary_factor=partial_rotary_factor)  # which transformers reads with some scalings only
    outside = ("rope_theta", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings")
    fields = {name: value for name, value in fields.items() if name not in outside}
    full, local = (
        rope(
            fields | {"rope_parameters": of_layer_type(kinds[kind])},
            size=size,
            partial_rotary_factor=partial_rotary_factor,
        )
        for kind, size in zip(("full_attention", "sliding_attention"), sizes, strict=True)
    )
    return full, local


def of_layer_type(parameters: Fields) -> Fields:
    """Return the object of a layer type without `truncate`, which transformers reads over there. Raises CheckpointError
    if it is false.
    """
    require(parameters, truncate=True)
    return {name: value for name, value in parameters.items() if name != "truncate"}


def rope_parameters(fields: Fields) -> Fields:
    """Return the rotary embedding fields of a config.json, in either format, as one dictionary.

    Raises CheckpointError for fields that are not supported, as they might change every position.
    """
    given = rope_object(fields)
    if by_layer_type := sorted(name for name, value in given.items() if isinstance(value, dict)):
        raise CheckpointError(
            f"config.json: rope_parameters by layer type ({', '.join(by_layer_type)}) are not supported: all "
            "layers of this model_type are rotated alike"
        )
    require(given, attn_factor=1, extrapolation_factor=1)  # of YaRN's first implementations
    if unknown := sorted(given.keys() - _FIELDS - {"attn_factor", "extrapolation_factor"}):
        raise CheckpointError(f"config.json: unknown in rope_parameters or rope_scaling: {', '.join(unknown)}")
    # Fields next to the object apply unless they are repeated inside; but the original context counts as it is outside.
    outer = {name: fields[name] for name in ("rope_theta", "partial_rotary_factor") if name in fields}
    original = "original_max_position_embeddings"
    return outer | given | ({original: fields[original]} if original in fields else {})


def rope_object(fields: Fields) -> Fields:
    """Return a copy of `rope_parameters`, or of `rope_scaling` if there is one."""
    given = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"config.json: rope_parameters or rope_scaling must be an object, got {given!r:.100}")
    return dict(given)


def _kind(parameters: Fields) -> object:
    return parameters.get("rope_type", parameters.get("type", "default"))


def _scaling(fields: Fields, parameters: Fields, rotated: int, *, is_context_stretched: bool) -> Scaling | None:
    kind, context = _kind(parameters), integer(fields, "max_position_embeddings")
    match kind:
        case "default":
            return None
        case "linear":
            stretch = number(parameters, "factor")
            original = int(context / stretch) if is_context_stretched else context
            return LinearScaling(factor=stretch, original_max_position_embeddings=original)
        case "llama3":
            low, high = number(parameters, "low_freq_factor"), number(parameters, "high_freq_factor")
            if low > high:
                raise CheckpointError(f"config.json: low_freq_factor ({low}) is above high_freq_factor ({high})")
            return Llama3Scaling(
                factor=number(parameters, "factor"),
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_position_embeddings=integer(parameters, "original_max_position_embeddings", context),
            )
        case "frequency_factors":  # GGUF files have this instead of llama3's parameters
            return PairScaling(factors=numbers(parameters, "factors", rotated // 2))
        case "longrope":
            return _longrope(parameters, context, rotated // 2)
        case "yarn":
            return _yarn(parameters, context)
        case "dynamic" if rotated > 2:
            return DynamicScaling(
                factor=number(parameters, "factor"), original_max_position_embeddings=context, context=context
            )
        case "dynamic":
            raise CheckpointError("config.json: rope_type 'dynamic' needs more than 2 rotated dimensions of a head")
        case _:
            known = "default, linear, dynamic, yarn, longrope, llama3"
            raise CheckpointError(f"config.json: unknown rope_type {kind!r}; known are {known}")


def _longrope(parameters: Fields, context: int, num_pairs: int) -> LongRopeScaling:
    original = integer(parameters, "original_max_position_embeddings", context, minimum=2)
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
    stretch = number(parameters, "factor", context / original)
    beta_fast, beta_slow = number(parameters, "beta_fast", 32.0), number(parameters, "beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise CheckpointError(f"config.json: beta_fast ({beta_fast}) must be at least beta_slow ({beta_slow})")

    def length(name: str) -> float | None:  # scale of vectors, for a weight that may be missing or 0
        return 1.0 + 0.1 * number(parameters, name) * math.log(max(stretch, 1.0)) if parameters.get(name) else None

    rotated, everywhere = length("mscale"), length("mscale_all_dim")
    default = 1.0 + 0.1 * math.log(max(stretch, 1.0)) if rotated is None or everywhere is None else rotated / everywhere
    return YarnScaling(
        factor=stretch,
        original_max_position_embeddings=original,
        attention_factor=number(parameters, "attention_factor", default),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        is_truncated=flag(parameters, "truncate", "truncate" not in parameters),
        score_factor=1.0 if everywhere is None else everywhere**2,
    )
