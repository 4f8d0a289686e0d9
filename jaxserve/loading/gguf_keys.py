"""What the metadata of a GGUF file has under the name of its architecture. No jax."""

from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.loading.gguf import GGUFFile


def get(file: GGUFFile, name: str, default: Any = None) -> Any:
    """The value of a key, which need not be there."""
    return file.metadata.get(f"{file.architecture}.{name}", default)


def positive_integer(file: GGUFFile, name: str, default: int | None = None) -> int:
    """A positive integer; without a default it must be there."""
    if default is not None and get(file, name) is None:
        return default
    value = file.require(f"{file.architecture}.{name}", int)
    if value < 1:
        raise CheckpointError(f"{file.path}: {file.architecture}.{name} must be positive, got {value}")
    return value


def number(file: GGUFFile, name: str, default: float | None = None) -> float:
    """A number; without a default it must be there."""
    if default is not None and get(file, name) is None:
        return default
    return file.require(f"{file.architecture}.{name}", float)


def refuse(file: GGUFFile, **served: Any) -> None:
    """Raises CheckpointError for a key that is there and has another value than the one of these that is served."""
    for name, value in served.items():
        key = f"{file.architecture}.{name}"
        if key in file.metadata and file.metadata[key] != value:
            raise CheckpointError(f"{file.path}: {key} {file.metadata[key]!r} is not supported")
