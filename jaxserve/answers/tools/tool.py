"""A tool, as readers and writers of calls see it."""

from typing import Any, NamedTuple


class Tool(NamedTuple):
    """A function that the model may call; `parameters` is a JSON schema, `is_strict`: every call must follow it."""

    name: str
    parameters: dict[str, Any]
    is_strict: bool = False
