"""Converts values that a model has written without quotes to JSON, of the types in the tool's schema."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import regex

from jaxserve.answers.literals.value import to_json
from jaxserve.structured.pointers import find

MAX_SCHEMAS = 256
"""Schemas that are read to learn what one property is, before that counts as unknown."""

MAX_PATTERN_SECONDS = 0.05
"""Time that one of a schema's own patterns may take on a property's name."""

_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_ALIASES = {
    **dict.fromkeys(("string", "str", "text", "varchar", "char", "enum", "date", "datetime", "uuid"), "string"),
    **dict.fromkeys(("integer", "int", "int32", "int64", "long", "short", "uint"), "integer"),
    **dict.fromkeys(("number", "float", "double", "decimal"), "number"),
    **dict.fromkeys(("boolean", "bool", "binary"), "boolean"),
    **dict.fromkeys(("array", "list", "tuple", "set", "sequence"), "array"),
    **dict.fromkeys(("object", "dict", "map", "mapping"), "object"),
    **dict.fromkeys(("null", "none", "nonetype"), "null"),
}
_WORDS = {"null": None, "none": None, "nil": None, "true": True, "1": True, "false": False, "0": False}
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_DIGITS = re.compile(r"[+-]?0+[0-9]{1,1000}")
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOTHING = object()


@dataclass(frozen=True)
class Kind:
    """What a value may be: JSON types (empty if unknown), and the allowed values if the schema lists them."""

    types: frozenset[str] = frozenset()
    values: tuple[Any, ...] = ()

    @property
    def is_text(self) -> bool:
        """True if the value is certainly a text, or stays one because nothing is known."""
        return self.types <= {"string"}


class _TooLarge(Exception):
    """More than MAX_SCHEMAS schemas say what one property is."""


def property_kind(schema: Mapping[str, Any], key: str) -> Kind:
    """Return what a tool's parameters specify for the property `key`."""
    search = _Search(schema)
    try:
        return _all_of([search.kind(each) for each in search.properties(schema, key)]) or Kind()
    except _TooLarge:
        return Kind()


def inner_kind(root: Mapping[str, Any], schema: Any, key: str | None) -> tuple[Any, Kind]:
    """Return the schema that `schema`, a part of `root`, has for its property `key` (None: for its items), and what it
    specifies.
    """
    try:
        inner = {"allOf": _Search(root).properties(schema, key)}
        return inner, _Search(root).kind(inner) or Kind()
    except _TooLarge:
        return {}, Kind()


def property_names(schema: Mapping[str, Any]) -> list[str]:
    """Return the names of the properties that a tool's parameters list, in their order."""
    return list(_dict(schema.get("properties")))


def keys_of(value: str) -> set[str]:
    """Return the keys of an object in JSON; none if it is no object, or is not complete."""
    loaded = _loaded(value)
    return set(loaded) if isinstance(loaded, dict) else set()


class _Search:
    """Follows references through one schema, each of them once, and gives up when that takes too long."""

    def __init__(self, root: Mapping[str, Any]):
        self._root = root
        self._num_left = MAX_SCHEMAS
        self._referred: dict[str, Kind | None] = {}
        self._parents: set[str] = set()  # references in which properties have been looked up

    def _count(self) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            raise _TooLarge

    def properties(self, schema: Any, key: str | None) -> list[Any]:
        """Return the schemas that an object's schema has for the property `key`; None: a list's has for its items."""
        self._count()
        if not isinstance(schema, dict):
            return []
        named, patterns = _dict(schema.get("properties")), _dict(schema.get("patternProperties"))
        rest = schema.get("items" if key is None else "additionalProperties")
        found = [named[key]] if key in named else []
        found += [each for pattern, each in patterns.items() if key is not None and _matches(pattern, key)]
        if not found and isinstance(rest, dict):
            found = [rest]
        parts = [part for word in ("allOf", "anyOf", "oneOf") for part in _list(schema.get(word))]
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self._parents:
            self._parents.add(reference)
            parts.append(find(self._root, reference))
        return found + [each for part in parts for each in self.properties(part, key)]

    def kind(self, schema: Any) -> Kind | None:
        """Return what a value of `schema` may be; None if its references form a cycle."""
        self._count()
        if not isinstance(schema, dict):
            return Kind()
        kinds: list[Kind | None] = []
        if (given := schema.get("type")) is not None:
            kinds.append(_declared(given, is_nullable=schema.get("nullable") is True))
        if values := _list(schema.get("enum")) or ([schema["const"]] if "const" in schema else []):
            kinds.append(Kind(frozenset(_TYPES[type(value)] for value in values), tuple(values)))
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in self._referred:
                self._referred[reference] = None  # for references back to it meanwhile
                self._referred[reference] = self.kind(find(self._root, reference))
            kinds.append(self._referred[reference])
        kinds += [self.kind(part) for part in _list(schema.get("allOf"))]
        for word in ("anyOf", "oneOf"):
            if options := _list(schema.get(word)):
                kinds.append(_any_of([self.kind(option) for option in options]))
        if not kinds:
            return Kind(frozenset({"object"})) if "properties" in schema else Kind()
        return _all_of(kinds)


def _declared(given: Any, *, is_nullable: bool) -> Kind:
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    types = {_ALIASES.get(name.lower(), "") for name in names if isinstance(name, str)}
    return Kind() if not types or "" in types else Kind(frozenset(types | ({"null"} if is_nullable else set())))


def _any_of(kinds: list[Kind | None]) -> Kind | None:
    known = [kind for kind in kinds if kind is not None]
    if any(not kind.types for kind in known):
        return Kind()
    values = tuple(value for kind in known for value in kind.values) if all(kind.values for kind in known) else ()
    return Kind(frozenset().union(*(kind.types for kind in known)), values) if known else None


def _all_of(kinds: list[Kind | None]) -> Kind | None:
    known = [kind for kind in kinds if kind is not None]
    told = [kind for kind in known if kind.types]
    if not told:
        return Kind() if known else None
    types = told[0].types
    for kind in told[1:]:
        both = {name for name in types | kind.types if _fits(name, types) and _fits(name, kind.types)}
        types = frozenset(both) or types
    return Kind(types, next((kind.values for kind in told if kind.values), ()))


def _fits(name: str, types: frozenset[str]) -> bool:
    return name in types or (name == "integer" and "number" in types)


def json_value(text: str, kind: Kind) -> str:
    """Return `text` as JSON, of this kind if possible; otherwise as what it is."""
    if kind.is_text and not kind.values:
        return _dumped(text)
    exact = _loaded(text)
    found = [value for value in _candidates(text, exact) if _fits(_TYPES[type(value)], kind.types)]
    listed = [value for value in found if any(type(value) is type(each) and value == each for each in kind.values)]
    for value in [*listed, *found]:
        return text.strip() if value is exact and _JSON_NUMBER.fullmatch(text.strip()) else _dumped(value)
    return _dumped(text if exact is _NOTHING or "string" in kind.types else exact)


def arguments_of(value: str, schema: Mapping[str, Any]) -> str:
    """Return the arguments of a call, an object, given the JSON `value` that a model has written for them.

    Nothing, blanks and an empty list mean no arguments, and a text may contain an object. Any other value is that of
    the first property, like a positional argument of a Python call; if the schema names no property, its name is empty.
    """
    text = json.loads(value) if value[:1] == '"' else None
    spelled = None if text is None else to_json(text)
    if value[:1] == "{" or (spelled is not None and spelled[0] == "{"):
        return spelled or value
    if value in ("", "null") or "".join(value.split()) == "[]" or (text is not None and not text.strip()):
        return "{}"
    name = next(iter(property_names(schema)), "")
    return f"{{{_dumped(name)}: {value if text is None else json_value(text, property_kind(schema, name))}}}"


def _candidates(text: str, exact: Any) -> list[Any]:
    """Return the values that a text may mean, the likeliest first."""
    found: list[Any] = [] if exact is _NOTHING or isinstance(exact, str) else [exact]
    bare = exact.strip() if isinstance(exact, str) else text.strip()
    if bare.lower() in _WORDS:
        found.append(_WORDS[bare.lower()])
    if _DIGITS.fullmatch(bare):
        found.append(int(bare))
    inner = _loaded(bare)
    if inner is _NOTHING and '\\"' in bare:  # it may have been escaped once more
        inner = _loaded(to_json(f'"{bare}"') or "")
        inner = _loaded(inner) if isinstance(inner, str) else _NOTHING
    if inner is not _NOTHING and not isinstance(inner, str):
        found.append(inner)
        if isinstance(inner, float) and inner.is_integer():
            found.append(int(inner))
    return [*found, text, text.strip()]


def _loaded(text: str) -> Any:
    """Return the value of a text in JSON or in Python; `_NOTHING` if there is none that can be sent."""
    try:
        value = json.loads(to_json(text) or "")
        is_known = value is not None or text.strip() in ("null", "None")  # NaN has become null
        return value if is_known and _dumped(value) else _NOTHING
    except (ValueError, RecursionError):
        return _NOTHING


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _matches(pattern: str, key: str) -> bool:
    try:
        return regex.search(pattern, key, timeout=MAX_PATTERN_SECONDS) is not None
    except (regex.error, TimeoutError):
        return False


def _dumped(value: Any) -> str:
    """Return a value as JSON, with unpaired surrogates escaped: they cannot be sent. Raises ValueError for NaN."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(value, allow_nan=False)
