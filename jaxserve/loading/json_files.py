"""JSON files of a model directory, and what is wrong with one that cannot be read. No jax."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError, naming the file, if it is missing or holds no object."""
    try:
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise CheckpointError(f"cannot read {path}: it is empty")
        fields = json.loads(text)
    except FileNotFoundError:
        raise CheckpointError(f"no {path.name} in {path.parent}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: it is no JSON ({error})") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {fields!r:.100}")
    return fields


def eos_token_ids(fields: Mapping[str, Any], path: pathlib.Path) -> tuple[int, ...]:
    """`eos_token_id` of the file at `path`: none, one or a list. Raises CheckpointError, naming the file."""
    value = fields.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of them, got {value!r:.100}")
    return tuple(ids)
