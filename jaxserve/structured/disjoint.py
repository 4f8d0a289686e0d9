"""Decide if two JSON schemas have no value in common, judging by their own keywords: `oneOf` may then become
`anyOf`.
"""

from collections.abc import Callable
from typing import Any

from jaxserve.structured import numbers

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_MAX_DEPTH = 8

Resolve = Callable[[str], Any]
"""Returns the schema that a reference names, or None if it is not in the document or not found by a plain path."""


def are_disjoint(one: Any, other: Any, resolve: Resolve, *, depth: int = 0) -> bool:
    """Return true if no value satisfies both schemas. False may also mean that it cannot be decided."""
    one, other = follow(one, resolve), follow(other, resolve)
    if one is False or other is False:
        return True
    if not (isinstance(one, dict) and isinstance(other, dict)) or depth > _MAX_DEPTH:
        return False
    for keyword in ("anyOf", "oneOf"):
        for several, single in ((one, other), (other, one)):
            branches = several.get(keyword)
            if isinstance(branches, list) and all(
                are_disjoint(branch, single, resolve, depth=depth + 1) for branch in branches
            ):
                return True
    if not types(one) & types(other) and not _differ_in_integers_only(one, other):
        return True
    values, other_values = _values(one), _values(other)
    if values is not None and other_values is not None:
        return not any(_are_equal(value, it) for value in values for it in other_values)
    if types(one) | types(other) <= {"integer", "number"}:
        return _are_ranges_disjoint(one, other)
    return types(one) | types(other) == {"object"} and _differ_in_a_property(one, other, resolve, depth)


def follow(schema: Any, resolve: Resolve) -> Any:
    """Return the schema that a schema consisting only of a reference stands for, or any other schema unchanged."""
    for _ in range(_MAX_DEPTH):
        if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str)):
            break
        target = resolve(schema["$ref"])
        if target is None or any(keyword in schema for keyword in ("const", "enum", "properties", "anyOf", "oneOf")):
            break
        schema = target
    return schema


def types(schema: dict[str, Any]) -> set[str]:
    """Return the types that a schema's own `type`, `const` and `enum` allow."""
    given = schema.get("type", list(TYPES))
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    allowed = {name for name in names if isinstance(name, str)}
    if (values := _values(schema)) is not None:
        found = {_type_of(value) for value in values}
        allowed &= found | ({"number"} if "integer" in found else set()) | ({"integer"} if "number" in found else set())
    return allowed


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _differ_in_integers_only(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return true if one schema allows integers and the other allows numbers, which include integers."""
    return any("integer" in types(a) and "number" in types(b) for a, b in ((one, other), (other, one)))


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _are_equal(one: Any, other: Any) -> bool:
    """Return true if values are equal as JSON: 1 equals 1.0, but not true. Different lists or objects may compare
    equal.
    """
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return one == other


def _are_ranges_disjoint(one: dict[str, Any], other: dict[str, Any]) -> bool:
    for low, high in ((one, other), (other, one)):
        for keyword, is_strict in (("maximum", False), ("exclusiveMaximum", True)):
            for lower, is_lower_strict in (("minimum", False), ("exclusiveMinimum", True)):
                top, bottom = low.get(keyword), high.get(lower)
                if not (numbers.is_number(top) and numbers.is_number(bottom)):
                    continue
                if top < bottom or (top == bottom and (is_strict or is_lower_strict)):
                    return True
    return False


def _differ_in_a_property(one: dict[str, Any], other: dict[str, Any], resolve: Resolve, depth: int) -> bool:
    """Return true if one of them requires a property for which no value satisfies both."""
    for name in {*_required(one), *_required(other)}:
        if are_disjoint(_property(one, name), _property(other, name), resolve, depth=depth + 1):
            return True
    return False


def _required(schema: dict[str, Any]) -> list[str]:
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def _property(schema: dict[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    if "patternProperties" in schema:
        return True
    return schema.get("additionalProperties", True)
