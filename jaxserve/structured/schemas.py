"""Rewrite JSON schemas so that the grammar engine can follow them, or refuse them, naming the keyword and its path.

A schema is never loosened: what satisfies the rewritten one satisfies the original. Formats that JSON Schema does not
define are annotations by its own rules, and are dropped.
"""

import json
import re
import urllib.parse
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from jaxserve.structured import numbers
from jaxserve.structured.disjoint import TYPES, are_disjoint, follow, types

_FOLLOWED_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_STANDARD_FORMATS = frozenset(
    ("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer")
) | {"relative-json-pointer", "regex"}
"""Formats that JSON Schema defines, but for which there is no grammar."""

_DRAFTS = ("draft-04", "draft-06", "draft-07", "2019-09", "2020-12")
# Keywords that a grammar cannot follow, with the first draft that defines them; earlier drafts ignore them.
_UNSUPPORTED = {
    "not": "draft-04",
    "uniqueItems": "draft-04",
    "dependencies": "draft-04",
    "contains": "draft-06",
    "propertyNames": "draft-06",
    "if": "draft-07",
    "dependentRequired": "2019-09",
    "dependentSchemas": "2019-09",
    "unevaluatedProperties": "2019-09",
    "unevaluatedItems": "2019-09",
    "$recursiveRef": "2019-09",
    "$dynamicRef": "2020-12",
}
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref")
_CONDITIONS = ("not", "if", "then", "else", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef")
_NOT_CLOSED_BESIDE = frozenset(
    (*_IN_PLACE, *_CONDITIONS, "additionalProperties", "patternProperties", "unevaluatedProperties", "const", "enum")
)
WITHOUT_MEANING = frozenset(
    ("type", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
) | {"$defs", "definitions", "$schema", "$id", "$anchor", "nullable", "discriminator", "example"}
_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains")
_ENDLESS = 2**31
"""A number of items or characters that no answer reaches."""


class Unfollowable(ValueError):
    """A schema that cannot be turned into a grammar. The message names the keyword and its path."""


class _Node(NamedTuple):
    schema: Any
    path: str
    is_shared: bool
    """True if another schema may apply to the same values, so that this one must not be closed."""


def followable(text: str, *, is_closed: bool) -> Any:
    """Parse a schema and rewrite it so that the grammar engine can follow it.

    With `is_closed`, objects have only the properties that their schema names, if it names some, does not mention
    others, and stands alone. Raises Unfollowable.
    """
    try:
        root = json.loads(text, parse_float=numbers.Literal, parse_constant=_refuse_constant)
        text.encode()
    except (ValueError, RecursionError) as error:
        raise Unfollowable(f"not a JSON schema: {error}") from error
    if not isinstance(root, dict | bool):
        raise Unfollowable("not a JSON schema, which is an object or a boolean")
    if isinstance(root, dict):
        _Rewriter(root, is_closed=is_closed).rewrite()
    return root


def describes_object(schema: Any) -> bool:
    """Return true if a schema allows only objects, by its own `type` or that of the schema it refers to."""
    target = follow(schema, lambda reference: find(schema, reference))
    return isinstance(target, dict) and types(target) == {"object"}


class _Rewriter:
    """Visits all schemas reachable from a document's root, and rewrites each in place."""

    def __init__(self, root: dict[str, Any], *, is_closed: bool):
        self._root = root
        self._is_closed = is_closed
        self._waiting: list[_Node] = []
        self._seen: dict[int, _Node] = {}
        self._multiples: set[Fraction] = set()
        version = root.get("$schema")
        found = [draft for draft in _DRAFTS if isinstance(version, str) and draft in version]
        self._draft = _DRAFTS.index(found[0] if found else _DRAFTS[-1])
        # With a nested `$id`, references are resolved relative to it, by rules of their own.
        self._has_plain_paths = not any(
            "$id" in schema for schema in objects(root) if schema is not root and isinstance(schema.get("$id"), str)
        )

    def rewrite(self) -> None:
        self._waiting.append(_Node(self._root, "#", is_shared=False))
        while self._waiting:
            node = self._waiting.pop()
            if isinstance(node.schema, bool):
                continue
            if not isinstance(node.schema, dict):
                raise Unfollowable(f"{node.path} must be an object or a boolean")
            before = self._seen.get(id(node.schema))
            if before is not None and (before.is_shared or not node.is_shared):
                continue
            self._seen[id(node.schema)] = node
            if before is None:
                self._rewrite(node)
            self._waiting.extend(reversed(list(self._inner(node))))
        if not numbers.can_be_combined(self._multiples):
            raise Unfollowable("multipleOf: values as large as these cannot be followed together")
        if self._is_closed:
            for node in self._seen.values():
                if not node.is_shared and _can_be_closed(node.schema):
                    node.schema["additionalProperties"] = False

    def _rewrite(self, node: _Node) -> None:
        schema, path = node.schema, node.path
        _drop_what_says_nothing(schema)
        _rewrite_not(schema)
        for keyword, draft in _UNSUPPORTED.items():
            if keyword in schema and self._draft >= _DRAFTS.index(draft):
                raise Unfollowable(f"{keyword!r} at {path} is not supported")
        self._rewrite_one_of(node)
        name = schema.get("format")
        if isinstance(name, str) and name not in _FOLLOWED_FORMATS:
            if name in _STANDARD_FORMATS and "string" in types(schema):
                raise Unfollowable(f"'format' {name!r} at {path} is not supported")
            del schema["format"]
        _check_values(schema, path)
        self._rewrite_numbers(node)

    def _rewrite_numbers(self, node: _Node) -> None:
        schema, path = node.schema, node.path
        allowed = types(_own_type(schema))
        if not allowed & {"integer", "number"}:
            return
        try:
            numbers.move_bounds_inside(schema, is_integer="number" not in allowed)
            if numbers.is_number(schema.get("multipleOf")):
                multiple = numbers.multiple_of(schema["multipleOf"])
                if node.is_shared or any(keyword in schema for keyword in _IN_PLACE):
                    self._multiples.add(multiple)
        except ValueError as error:
            raise Unfollowable(f"{error} (at {path})") from error

    def _rewrite_one_of(self, node: _Node) -> None:
        """Replace `oneOf` by `anyOf` if no value satisfies two branches, where need be by closing their objects: what
        is written by one closed branch must not satisfy another as it was given.
        """
        schema = node.schema
        branches = schema.get("oneOf")
        if "anyOf" in schema or not isinstance(branches, list) or not self._has_plain_paths:
            return
        if len(branches) > _MAX_COMPARED:
            return
        written = branches
        if not self._are_disjoint(branches, branches):
            if not self._is_closed or node.is_shared or not _stands_alone(schema):
                return
            written = [_closed(branch) for branch in branches]
            if not self._are_disjoint(written, branches):
                return
        items = [("anyOf", written) if name == "oneOf" else (name, value) for name, value in schema.items()]
        schema.clear()
        schema.update(items)  # keeps the order of keywords, which is that of properties

    def _are_disjoint(self, written: list[Any], given: list[Any]) -> bool:
        """Return true if what one of the `written` branches allows satisfies none of the others that were `given`."""
        return all(
            are_disjoint(one, other, self._find)
            for index, one in enumerate(written)
            for position, other in enumerate(given)
            if index != position
        )

    def _inner(self, node: _Node) -> Iterator[_Node]:
        """Yield the schemas that a schema applies or refers to."""
        schema, path = node.schema, node.path
        is_shared = node.is_shared or not _stands_alone(schema)
        for keyword in ("allOf", "anyOf", "oneOf"):
            branches = schema.get(keyword)
            for index, branch in enumerate(branches if isinstance(branches, list) else ()):
                yield _Node(branch, f"{path}/{keyword}/{index}", is_shared or keyword != "anyOf")
        if isinstance(reference := schema.get("$ref"), str):
            target = self._find(reference) if self._has_plain_paths else None
            if target is not None:
                yield _Node(target, reference, is_shared)
            else:  # an anchor or the like: it may name any object in the document
                self._is_closed = False
                for found in objects(self._root):
                    _check_values(found, "#")
                    _check_bounds(found)
        allowed = types(_own_type(schema))
        if "object" in allowed:
            is_shared |= "patternProperties" in schema
            for keyword in ("properties", "patternProperties"):
                named = schema.get(keyword)
                for name, inner in named.items() if isinstance(named, dict) else ():
                    yield _Node(inner, f"{path}/{keyword}/{name}", is_shared)
            if "additionalProperties" in schema:
                yield _Node(schema["additionalProperties"], f"{path}/additionalProperties", is_shared)
        if "array" in allowed:
            for keyword in ("prefixItems", "items", "additionalItems"):
                inner = schema.get(keyword)
                if isinstance(inner, list):
                    for index, item in enumerate(inner):
                        yield _Node(item, f"{path}/{keyword}/{index}", is_shared)
                elif keyword != "prefixItems" and inner is not None:
                    yield _Node(inner, f"{path}/{keyword}", is_shared)

    def _find(self, reference: str) -> Any:
        return find(self._root, reference)


_MAX_COMPARED = 64
"""Maximum branches of a `oneOf` that are compared pairwise."""


def _stands_alone(schema: dict[str, Any]) -> bool:
    """Return true if a schema's own keywords, and those of at most one it applies in place, decide by themselves."""
    in_place = [keyword for keyword in _IN_PLACE if keyword in schema]
    return len(in_place) <= 1 and (not in_place or schema.keys() - WITHOUT_MEANING <= {*in_place})


def _closed(schema: Any) -> Any:
    """Return a schema of objects without the properties that it does not name, if it can be closed."""
    if isinstance(schema, dict) and _can_be_closed(schema):
        return {**schema, "additionalProperties": False}
    return schema


def _drop_what_says_nothing(schema: dict[str, Any]) -> None:
    """Remove unsupported keywords whose values have no effect, and normalize others."""
    for keyword in _SIZES:
        value = schema.get(keyword)
        if isinstance(value, float) and value.is_integer():
            schema[keyword] = value = int(value)
        if keyword.startswith("max") and numbers.is_number(value) and value >= _ENDLESS:
            del schema[keyword]
    if schema.get("minContains") == 0 and "maxContains" not in schema:
        schema.pop("contains", None)
    if "then" not in schema and "else" not in schema:
        schema.pop("if", None)
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
    empty: dict[str, Callable[[Any], bool]] = {
        "uniqueItems": lambda value: value is False or _is_at_most_one(schema.get("maxItems")),
        "not": lambda value: value is False,
        "propertyNames": lambda value: value is True or value in ({}, {"type": "string"}),
        "dependentRequired": lambda value: value == {},
        "dependentSchemas": lambda value: value == {},
        "dependencies": lambda value: value == {},
        "$dynamicAnchor": lambda _: True,  # only has meaning for a $dynamicRef
        "$recursiveAnchor": lambda _: True,
    }
    for keyword, says_nothing in empty.items():
        if keyword in schema and says_nothing(schema[keyword]):
            del schema[keyword]
    _rewrite_unevaluated(schema, "unevaluatedProperties", "additionalProperties", beside=_CONDITIONS)
    _rewrite_unevaluated(schema, "unevaluatedItems", "items", beside=(*_CONDITIONS, "contains", "additionalItems"))


def _rewrite_unevaluated(schema: dict[str, Any], keyword: str, additional: str, *, beside: tuple[str, ...]) -> None:
    """Replace `unevaluated...` by `additional...` if only the schema's own properties or items are evaluated."""
    if keyword not in schema:
        return
    if schema[keyword] is True or schema[keyword] == {}:
        del schema[keyword]
        if additional == "additionalProperties":
            schema.setdefault(additional, True)  # marks the object as not to be closed
    elif not any(name in schema for name in (*_IN_PLACE, *beside)):
        rest = schema.pop(keyword)
        schema.setdefault(additional, rest)


def _rewrite_not(schema: dict[str, Any]) -> None:
    """Rewrite `not` of types, or of values next to an `enum`, as what is left. Leave any other `not` unchanged."""
    excluded = schema.get("not")
    if excluded is True or excluded == {}:
        raise Unfollowable("nothing satisfies 'not' of everything")
    if not isinstance(excluded, dict):
        return
    (keyword, value), *more = excluded.items()
    if more:
        return
    if keyword == "type":
        names = types(excluded)
        allowed = types(_own_type(schema))
        if (
            not names <= set(TYPES)
            or not names
            or ("integer" in names and "number" not in names and "number" in allowed)
        ):
            return  # "numbers that are not integers" is not a type
        left = allowed - names - ({"integer"} if "number" in names else set())
        if not left:
            raise Unfollowable("nothing satisfies 'not' of the only type that is allowed")
        del schema["not"]
        schema["type"] = sorted(left - ({"integer"} if "number" in left else set()))
    elif keyword in ("const", "enum") and "enum" in schema and isinstance(schema["enum"], list):
        values = [value] if keyword == "const" else value
        if isinstance(values, list):
            del schema["not"]
            schema["enum"] = [item for item in schema["enum"] if not any(_may_be_equal(item, it) for it in values)]


def _own_type(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": schema["type"]} if "type" in schema else {}


def _may_be_equal(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _can_be_closed(schema: dict[str, Any]) -> bool:
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not _NOT_CLOSED_BESIDE.isdisjoint(schema):
        return False
    required = schema.get("required", [])
    least = schema.get("minProperties", 0)
    return (
        isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and numbers.is_number(least)
        and least <= len(properties)
    )


def _check_values(schema: dict[str, Any], path: str) -> None:
    for keyword in ("const", "enum"):
        if keyword in schema and (number := numbers.inexact(schema[keyword])) is not None:
            raise Unfollowable(f"{keyword!r} at {path}: {numbers.show(number)} has too many digits to be followed")
    for keyword in ("minLength", "minItems", "minProperties"):
        if numbers.is_number(least := schema.get(keyword)) and least >= _ENDLESS:
            raise Unfollowable(f"{keyword!r} at {path}: {numbers.show(least)} is more than any answer has")


def _check_bounds(found: dict[str, Any]) -> None:
    """Raise Unfollowable if an object, which may or may not be a schema, has a bound that would have to be moved."""
    moved = dict(found)
    try:
        numbers.move_bounds_inside(moved, is_integer=False)
        if numbers.is_number(found.get("multipleOf")):
            numbers.multiple_of(found["multipleOf"])
    except ValueError as error:
        raise Unfollowable(str(error)) from error
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if moved.get(keyword) != found.get(keyword) and not isinstance(found.get(keyword), bool):
            raise Unfollowable(f"{keyword}: {numbers.show(found[keyword])} has too many digits to be followed here")


def _is_at_most_one(limit: Any) -> bool:
    return numbers.is_number(limit) and limit <= 1


def find(root: Any, reference: str) -> Any:
    """Return what a reference's JSON pointer names in the document, or None if nothing or if it is not a pointer."""
    if not re.fullmatch(r"#(/.*)?", reference, re.DOTALL):
        return None
    found = root
    for part in urllib.parse.unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects within a JSON value."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield item
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
