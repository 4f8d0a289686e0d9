"""Rewrite JSON schemas so that the grammar engine can follow them, or refuse them, naming the keyword and its path.

A schema is never loosened, unless its author allows it (`Rewriter.left_out`): what satisfies the rewritten one
satisfies the original. Formats that JSON Schema does not define are annotations by its own rules, and are dropped.
"""

import json
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from jaxserve.structured import numbers
from jaxserve.structured.disjoint import are_disjoint, follow, types
from jaxserve.structured.equivalents import (
    CONDITIONS,
    ENDLESS,
    IN_PLACE,
    WITHOUT_MEANING,
    Unfollowable,
    conditions_beside,
    mentions,
    own_type,
    replaceable,
    rewrite_conditions,
    simplify,
)
from jaxserve.structured.pointers import find, objects

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
_TOGETHER = {"if": ("then", "else"), "contains": ("minContains", "maxContains")}
"""Keywords that have no meaning without another one."""

_NOT_CLOSED_BESIDE = frozenset(
    (*IN_PLACE, *CONDITIONS, "additionalProperties", "patternProperties", "unevaluatedProperties", "const", "enum")
)
_OF_PROPERTIES = (*CONDITIONS, "unevaluatedProperties")
"""Keywords that may say which properties there are besides those of the schema itself."""


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
    root = parsed(text)
    if isinstance(root, dict):
        Rewriter(root, is_closed=is_closed).rewrite()
    return root


def parsed(text: str) -> Any:
    """Parse a schema, so that its numbers keep their source text. Raises Unfollowable if it is none."""
    try:
        root = json.loads(text, parse_float=numbers.Literal, parse_constant=_refuse_constant)
        text.encode()
    except (ValueError, RecursionError) as error:
        raise Unfollowable(f"not a JSON schema: {error}") from error
    if not isinstance(root, dict | bool):
        raise Unfollowable("not a JSON schema, which is an object or a boolean")
    return root


def describes_object(schema: Any) -> bool:
    """Return true if a schema allows only objects, by its own `type` or that of the schema it refers to."""
    target = follow(schema, lambda reference: find(schema, reference))
    return isinstance(target, dict) and types(target) == {"object"}


class Rewriter:
    """Visits all schemas reachable from a document's root, and rewrites each in place.

    Attributes:
        left_out: what a grammar cannot follow, with its path, if that `may_leave_out` from the schema; else it is an
            error.
    """

    def __init__(self, root: dict[str, Any], *, is_closed: bool, may_leave_out: bool = False):
        """Initialize with a schema; see `followable`."""
        self.left_out: list[str] = []
        self._may_leave_out = may_leave_out
        self._root = root
        self._is_closed = is_closed
        self._waiting: list[_Node] = []
        self._seen: dict[int, _Node] = {}
        self._multiples: set[Fraction] = set()
        self._conditions: set[int] = set()  # the ids of schemas in `allOf` that are rewritten with what is beside it
        version = root.get("$schema")
        found = [draft for draft in _DRAFTS if isinstance(version, str) and draft in version]
        self._draft = _DRAFTS.index(found[0] if found else _DRAFTS[-1])
        # With a nested `$id`, references are resolved relative to it, by rules of their own.
        self._has_plain_paths = not any(
            "$id" in schema for schema in objects(root) if schema is not root and isinstance(schema.get("$id"), str)
        )

    @property
    def nodes(self) -> Iterator[tuple[dict[str, Any], str]]:
        """The schemas that have been visited, with their paths."""
        return ((node.schema, node.path) for node in self._seen.values())

    def rewrite(self) -> None:
        """Rewrite the whole document. Raises Unfollowable."""
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
            if not self._may_leave_out:
                raise Unfollowable("multipleOf: values as large as these cannot be followed together")
            for node in self._seen.values():
                self._leave_out(node, "multipleOf")
        if self._is_closed:
            for node in self._seen.values():
                if not node.is_shared and _can_be_closed(node.schema):
                    node.schema["additionalProperties"] = False
        for node in self._seen.values():
            rewrite_conditions(node.schema)

    def _rewrite(self, node: _Node) -> None:
        schema, path = node.schema, node.path
        for keyword, draft in _UNSUPPORTED.items():
            if self._draft < _DRAFTS.index(draft):
                schema.pop(keyword, None)
        simplify(schema)
        for keyword in _UNSUPPORTED:
            if keyword in schema and not self._is_replaced(keyword, schema):
                self._cannot(node, keyword, f"{keyword!r} at {path} is not supported")
        self._conditions.update(map(id, conditions_beside(schema)))
        self._rewrite_one_of(node)
        name = schema.get("format")
        if isinstance(name, str) and name not in _FOLLOWED_FORMATS:
            if name in _STANDARD_FORMATS and "string" in types(schema):
                self._cannot(node, "format", f"'format' {name!r} at {path} is not supported")
            schema.pop("format", None)
        for keyword, reason in _values_beyond(schema, path):
            self._cannot(node, keyword, reason)
        _check_sizes(schema, path)
        self._rewrite_numbers(node)

    def _is_replaced(self, keyword: str, schema: dict[str, Any]) -> bool:
        """Return true if a keyword is replaced in the end, when all objects are known that are to be closed."""
        return keyword in replaceable(schema) or (keyword == "if" and id(schema) in self._conditions)

    def _cannot(self, node: _Node, keyword: str, reason: str) -> None:
        """Leave out a keyword that cannot be followed. Raises Unfollowable if none may be left out."""
        if not self._may_leave_out:
            raise Unfollowable(reason)
        self._leave_out(node, keyword)

    def _leave_out(self, node: _Node, keyword: str) -> None:
        schema = node.schema
        if keyword not in schema:
            return
        self.left_out.append(f"{keyword!r} at {node.path}")
        gone = [schema.pop(word, None) for word in (keyword, *_TOGETHER.get(keyword, ()))]
        if keyword in _OF_PROPERTIES and not _is_within(mentions(gone), schema):
            schema.setdefault("additionalProperties", True)  # marks the object as not to be closed

    def _rewrite_numbers(self, node: _Node) -> None:
        schema, path = node.schema, node.path
        allowed = types(own_type(schema))
        if not allowed & {"integer", "number"}:
            return
        while True:
            try:
                numbers.move_bounds_inside(schema, is_integer="number" not in allowed)
                if numbers.is_number(schema.get("multipleOf")):
                    multiple = numbers.multiple_of(schema["multipleOf"])
                    if node.is_shared or any(keyword in schema for keyword in IN_PLACE):
                        self._multiples.add(multiple)
            except numbers.Beyond as error:
                self._cannot(node, error.keyword, f"{error} (at {path})")
            except ValueError as error:
                raise Unfollowable(f"{error} (at {path})") from error
            else:
                return

    def _rewrite_one_of(self, node: _Node) -> None:
        """Replace `oneOf` by `anyOf` if no value satisfies two branches, where need be by closing their objects: what
        is written by one closed branch must not satisfy another as it was given.
        """
        schema = node.schema
        branches = schema.get("oneOf")
        if not isinstance(branches, list):
            return
        written = self._separated(branches, may_close=self._is_closed and not node.is_shared and _stands_alone(schema))
        if written is None:
            if not self._may_leave_out:
                return
            self.left_out.append(f"'oneOf' at {node.path}, of which several may be satisfied")
            written = branches
        if "anyOf" in schema:
            before = schema.get("allOf", [])
            if isinstance(before, list):
                del schema["oneOf"]
                schema["allOf"] = [*before, {"anyOf": written}]
            return
        items = [("anyOf", written) if name == "oneOf" else (name, value) for name, value in schema.items()]
        schema.clear()
        schema.update(items)  # keeps the order of keywords, which is that of properties

    def _separated(self, branches: list[Any], *, may_close: bool) -> list[Any] | None:
        """Return branches of which no value satisfies two; None if it is not known that there are none."""
        if not self._has_plain_paths or len(branches) > _MAX_COMPARED:
            return None
        if self._are_disjoint(branches, branches):
            return branches
        written = [_closed(branch) for branch in branches] if may_close else branches
        return written if may_close and self._are_disjoint(written, branches) else None

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
        is_shared = node.is_shared or not _stands_alone(schema) or "if" in schema
        for keyword in ("then", "else"):
            if keyword in schema:
                yield _Node(schema[keyword], f"{path}/{keyword}", is_shared=True)
        for keyword in ("dependentSchemas", "dependencies"):
            for name, then in schema.get(keyword, {}).items():
                is_shared = True
                if not isinstance(then, list):
                    yield _Node(then, f"{path}/{keyword}/{name}", is_shared=True)
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
                    for _, reason in (*_values_beyond(found, "#"), *_bounds_beyond(found)):
                        self._cannot(node, "$ref", reason)
                    _check_sizes(found, "#")
        allowed = types(own_type(schema))
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
    in_place = [keyword for keyword in IN_PLACE if keyword in schema]
    return len(in_place) <= 1 and (not in_place or schema.keys() - WITHOUT_MEANING <= {*in_place})


def _closed(schema: Any) -> Any:
    """Return a schema of objects without the properties that it does not name, if it can be closed."""
    if isinstance(schema, dict) and _can_be_closed(schema):
        return {**schema, "additionalProperties": False}
    return schema


def _can_be_closed(schema: dict[str, Any]) -> bool:
    properties = schema.get("properties")
    replaced = {keyword for keyword, said in replaceable(schema).items() if _is_within(mentions(said), schema)}
    if not isinstance(properties, dict) or schema.keys() & _NOT_CLOSED_BESIDE - replaced:
        return False
    required = schema.get("required", [])
    least = schema.get("minProperties", 0)
    return (
        isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and numbers.is_number(least)
        and least <= len(properties)
    )


def _values_beyond(schema: dict[str, Any], path: str) -> list[tuple[str, str]]:
    """Return keywords whose values would be rounded, with the reason in words."""
    return [
        (keyword, f"{keyword!r} at {path}: {numbers.show(number)} has too many digits to be followed")
        for keyword in ("const", "enum")
        if keyword in schema and (number := numbers.inexact(schema[keyword])) is not None
    ]


def _check_sizes(schema: dict[str, Any], path: str) -> None:
    for keyword in ("minLength", "minItems", "minProperties"):
        if numbers.is_number(least := schema.get(keyword)) and least >= ENDLESS:
            raise Unfollowable(f"{keyword!r} at {path}: {numbers.show(least)} is more than any answer has")


def _bounds_beyond(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return bounds of an object, which may or may not be a schema, that would have to be moved, with the reason."""
    moved = dict(found)
    try:
        numbers.move_bounds_inside(moved, is_integer=False)
        if numbers.is_number(found.get("multipleOf")):
            numbers.multiple_of(found["multipleOf"])
    except ValueError as error:
        return [("", str(error))]
    return [
        (keyword, f"{keyword}: {numbers.show(found[keyword])} has too many digits to be followed here")
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        if moved.get(keyword) != found.get(keyword) and not isinstance(found.get(keyword), bool)
    ]


def _is_within(names: set[str] | None, schema: dict[str, Any]) -> bool:
    """Return true if the properties of a schema include all of these, None standing for any."""
    properties = schema.get("properties")
    return names is not None and isinstance(properties, dict) and names <= properties.keys()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
