"""Read metadata of a GGUF file whose keys are prefixed with the architecture. No jax."""

from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.loading.bounds import GGUF_MAXIMA, MAX_NUMBER, is_within
from jaxserve.loading.gguf import GGUFFile


def check_numbers(file: GGUFFile) -> None:
    """Raise CheckpointError, naming the key, for a number that is not finite or beyond its bound."""
    prefix = f"{file.architecture}."
    for key, value in file.metadata.items():
        maximum = GGUF_MAXIMA.get(key.removeprefix(prefix), MAX_NUMBER) if key.startswith(prefix) else None
        for each in value if isinstance(value, list) else (value,):
            if maximum is not None and isinstance(each, int | float) and not is_within(each, maximum):
                raise CheckpointError(
                    f"{file.path}: {key} must be finite and at most {maximum:.10g}, got {each!r:.100}"
                )


def get(file: GGUFFile, name: str, default: Any = None) -> Any:
    """Return the value of a key, or the default if it is missing."""
    return file.metadata.get(f"{file.architecture}.{name}", default)


def positive_integer(file: GGUFFile, name: str, default: int | None = None) -> int:
    """Read a positive integer, which is required if there is no default."""
    if default is not None and get(file, name) is None:
        return default
    value = file.require(f"{file.architecture}.{name}", int)
    if value < 1:
        raise CheckpointError(f"{file.path}: {file.architecture}.{name} must be positive, got {value}")
    return value


def non_negative_integer(file: GGUFFile, name: str) -> int:
    """Read an integer of at least 0, which is 0 if it is missing."""
    return 0 if get(file, name) in (None, 0) else positive_integer(file, name)


def number(file: GGUFFile, name: str, default: float | None = None) -> float:
    """Read a number, which is required if there is no default."""
    if default is not None and get(file, name) is None:
        return default
    return file.require(f"{file.architecture}.{name}", float)


def refuse(file: GGUFFile, **served: Any) -> None:
    """Raise CheckpointError for a key whose value is not the supported one given here."""
    for name, value in served.items():
        key = f"{file.architecture}.{name}"
        if key in file.metadata and file.metadata[key] != value:
            raise CheckpointError(f"{file.path}: {key} {file.metadata[key]!r} is not supported")


def head_counts(file: GGUFFile, layer: int | None = None) -> tuple[int, int]:
    """Return the number of query heads, and of KV heads: those of a layer, or of all layers that have some, which must
    be the same.
    """
    num_heads = positive_integer(file, "attention.head_count")
    if file.architecture == "kimi-linear":  # whose counts are those of latents
        return num_heads, num_heads
    by_layer = get(file, "attention.head_count_kv")
    if not isinstance(by_layer, list):
        return num_heads, positive_integer(file, "attention.head_count_kv", num_heads)
    counts = {count for count in (by_layer if layer is None else by_layer[layer : layer + 1]) if count}
    if len(counts) > 1:
        raise CheckpointError(
            f"{file.path}: {file.architecture}.attention.head_count_kv {by_layer!r:.100} of layers that differ is not "
            "supported"
        )
    return num_heads, counts.pop() if counts else num_heads


def num_layers(file: GGUFFile) -> int:
    """Return the number of layers without those that predict further tokens, which are the last ones."""
    count, further = positive_integer(file, "block_count"), get(file, "nextn_predict_layers", 0)
    if not isinstance(further, int) or not 0 <= further < count:
        raise CheckpointError(
            f"{file.path}: {file.architecture}.nextn_predict_layers must be at least 0 and less than block_count, "
            f"got {further!r:.100}"
        )
    return count - further
