"""A value that a model has written without quotes, as JSON: what it is, the tool's schema says."""

import json
from collections.abc import Mapping
from typing import Any

MAX_SCHEMAS = 256  # that say what one property is, before its type counts as unknown

_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def value_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that the property `key` of a tool's parameters may have; none: the schema does not say."""
    properties = schema.get("properties")
    todo = [properties.get(key) if isinstance(properties, dict) else None]
    types: set[str] = set()
    followed: set[str] = set()
    for _ in range(MAX_SCHEMAS):
        if not todo:
            return frozenset(types)
        found = todo.pop()
        if not isinstance(found, dict):
            break
        given, reference = found.get("type"), found.get("$ref")
        if isinstance(given, str | list):
            types.update([given] if isinstance(given, str) else [kind for kind in given if isinstance(kind, str)])
        elif isinstance(found.get("enum"), list):
            types.update(_TYPES[type(value)] for value in found["enum"])
        elif "const" in found:
            types.add(_TYPES[type(found["const"])])
        elif isinstance(reference, str):
            if reference not in followed:  # they may go in circles
                followed.add(reference)
                todo.append(_referred(reference, schema))
        elif options := [found[name] for name in ("anyOf", "oneOf") if isinstance(found.get(name), list)]:
            todo += options[0]
        else:
            break
    return frozenset()


def json_value(text: str, types: frozenset[str]) -> str:
    """`text` as JSON, of one of these types where it can be: else it is a string."""
    try:
        value = json.loads(_PYTHON.get(text.strip(), text), parse_constant=_refuse)
        # A surrogate stays escaped: half of one cannot be sent.
        dumped = json.dumps(value, ensure_ascii="\\ud" in text.lower(), allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _TYPES[type(value)]
    fits = not types or kind in types or (kind == "integer" and "number" in types) or "string" not in types
    return dumped if fits else json.dumps(text, ensure_ascii=False)


def _referred(pointer: str, root: Mapping[str, Any]) -> Any:
    """What `#/...` points at; None if nothing is there."""
    found: Any = root
    for part in pointer.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found if pointer.startswith("#") else None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
