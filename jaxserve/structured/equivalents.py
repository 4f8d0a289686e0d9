"""Replace keywords of a JSON schema that the grammar engine does not know by others that mean the same."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.structured import numbers
from jaxserve.structured.disjoint import TYPES, types
from jaxserve.structured.pointers import objects

ENDLESS = 2**31
"""A number of items or characters that no answer reaches."""

WITHOUT_MEANING = frozenset(
    ("type", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
) | {"$defs", "definitions", "$schema", "$id", "$anchor", "nullable", "discriminator", "example"}
IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref")
CONDITIONS = ("not", "if", "then", "else", "$dynamicRef", "$recursiveRef")
_DEPENDENCIES = ("dependentRequired", "dependentSchemas", "dependencies")
CONDITIONS += _DEPENDENCIES

_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains")
_MAX_BRANCHES = 16
"""Maximum branches by which one keyword is replaced: each repeats the properties of its object."""

_MAX_BYTES = 32 * 1024
"""Maximum JSON characters by which `propertyNames` is replaced."""


class Unfollowable(ValueError):
    """A schema that cannot be turned into a grammar. The message names the keyword and its path."""


def own_type(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the types that a schema's own `type` allows."""
    return {"type": schema["type"]} if "type" in schema else {}


def simplify(schema: dict[str, Any]) -> None:
    """Remove keywords that have no effect, and replace those that can be said otherwise. Raises Unfollowable for a
    `not` that excludes everything.
    """
    _drop_what_says_nothing(schema)
    _rewrite_not(schema)
    _rewrite_contains(schema)
    _rewrite_property_names(schema)


def rewrite_conditions(schema: dict[str, Any]) -> None:
    """Replace what is `replaceable`, and numbers of properties, once it is known which objects are closed."""
    replaced = replaceable(schema)
    if "if" in replaced:
        _add_all_of(schema, [_choice(schema, schema)])
        for keyword in ("if", "then", "else"):
            schema.pop(keyword, None)
    known = [id(branch) for branch in conditions_beside(schema)]
    if known:
        schema["allOf"] = [_choice(each, schema) if id(each) in known else each for each in schema["allOf"]]
    for keyword in _DEPENDENCIES:
        if keyword in replaced:
            names = schema.pop(keyword)
            pairs = zip(names, replaced[keyword], strict=True)
            _add_all_of(schema, [{"anyOf": [{"properties": {name: False}}, then]} for name, then in pairs])
    _rewrite_numbers_of_properties(schema)


def replaceable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that depend on other properties and that `rewrite_conditions` replaces, each with the schemas
    that apply then: `if`, `then` and `else`, an `allOf` of these, and dependencies.
    """
    found: dict[str, Any] = {}
    if _is_known(schema, schema):
        found |= {keyword: [schema.get("then"), schema.get("else")] for keyword in ("if", "then", "else")}
    if "allOf" in schema and len(conditions := conditions_beside(schema)) == len(schema["allOf"]):
        found["allOf"] = conditions
    for keyword in _DEPENDENCIES:
        named = schema.get(keyword)
        if isinstance(named, dict) and all(isinstance(then, dict | bool | list) for then in named.values()):
            found[keyword] = [{"required": then} if isinstance(then, list) else then for then in named.values()]
    return found


def conditions_beside(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas in `allOf` that say nothing but `if`, `then` and `else`, and that can be replaced."""
    branches = schema.get("allOf")
    return [
        branch
        for branch in (branches if isinstance(branches, list) else [])
        if isinstance(branch, dict)
        and branch.keys() - WITHOUT_MEANING <= {"if", "then", "else"}
        and _is_known(branch, schema)
    ]


def _is_known(condition: Mapping[str, Any], of: Mapping[str, Any]) -> bool:
    """Return true if the `if` of a condition can be replaced in the schema `of` an object: one that asks for the
    presence of properties, and for listed values of one whose own schema lists its values.
    """
    asked = condition.get("if")
    if not isinstance(asked, dict) or types(own_type(dict(of))) != {"object"}:
        return False
    if "object" not in types(own_type(asked)) or not asked.keys() - WITHOUT_MEANING <= {"properties", "required"}:
        return False
    required, properties = asked.get("required", []), asked.get("properties", {})
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return False
    if len(required) > _MAX_BRANCHES or not isinstance(properties, dict) or len(properties) > 1:
        return False
    return all(_other_values(name, value, of) is not None for name, value in properties.items())


def mentions(value: Any) -> set[str] | None:
    """Return the names of properties in a value of a keyword, None if there may be others."""
    names: set[str] = set()
    for found in objects(value):
        if found.keys() & {"$ref", "$dynamicRef", "$recursiveRef", "patternProperties"}:
            return None
        for keyword in ("properties", "required"):
            named = found.get(keyword)
            names |= {name for name in named if isinstance(name, str)} if isinstance(named, dict | list) else set()
    return names


def _choice(condition: Mapping[str, Any], of: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choice between `if` with `then`, and what does not satisfy `if`, with `else`."""
    asked, then, other = condition["if"], condition.get("then", True), condition.get("else", True)
    required, properties = asked.get("required", []), asked.get("properties", {})
    branches = [({key: asked[key] for key in ("properties", "required") if key in asked}, then)]
    branches += [({"properties": {name: False}}, other) for name in required]
    for name, value in properties.items():
        rest = _other_values(name, value, of)
        if rest:
            branches.append(({"properties": {name: {"enum": rest}}, "required": [name]}, other))
    return {
        "anyOf": [
            branch if more is True or more == {} else {**branch, "allOf": [more]}
            for branch, more in branches
            if more is not False
        ]
    }


def _other_values(name: str, condition: Any, of: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a property may have and a condition does not list, None if either lists none."""
    properties = of.get("properties")
    given = _listed(properties.get(name) if isinstance(properties, dict) else None)
    listed = _listed(condition)
    if given is None or listed is None:
        return None
    return [value for value in given if not any(_may_be_equal(value, it) for it in listed)]


def _listed(schema: Any) -> list[Any] | None:
    """Return the values that a schema lists, None unless it says nothing else."""
    if not isinstance(schema, dict):
        return None
    meaning = schema.keys() - WITHOUT_MEANING
    if not meaning and types(schema) == {"boolean"}:
        return [False, True]
    if meaning not in ({"enum"}, {"const"}):
        return None
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if not isinstance(values, list):
        return None
    return [value for value in values if types({**own_type(schema), "const": value})]


def _rewrite_contains(schema: dict[str, Any]) -> None:
    """Replace `contains` of anything by a number of items."""
    if schema.get("contains") is not True and schema.get("contains") != {}:
        return
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    if isinstance(least, int) and isinstance(schema.get("minItems", 0), int):
        schema["minItems"] = max(least, schema.get("minItems", 0))
        if isinstance(most, int):
            schema["maxItems"] = min(most, schema.get("maxItems", most))
        for keyword in ("contains", "minContains", "maxContains"):
            schema.pop(keyword, None)


def _rewrite_property_names(schema: dict[str, Any]) -> None:
    """Replace `propertyNames` of listed names by these properties, and of a pattern or of a length by
    `patternProperties`.
    """
    names = schema.get("propertyNames")
    if not isinstance(names, dict) or "string" not in types(own_type(names)):
        return
    if "patternProperties" in schema or "unevaluatedProperties" in schema:
        return
    named, required = schema.get("properties", {}), schema.get("required", [])
    rest = schema.get("additionalProperties", True)
    if not isinstance(named, dict) or not isinstance(required, list):
        return
    meaning = names.keys() - WITHOUT_MEANING
    if (allowed := _listed(names)) is not None:
        allowed = [name for name in allowed if isinstance(name, str)]
        if len(allowed) * len(json.dumps(rest)) > _MAX_BYTES:
            return
        others = {name: False for name in (*named, *required) if isinstance(name, str) and name not in allowed}
        schema["properties"] = {**dict.fromkeys(allowed, rest), **named, **others}
    elif not named and meaning == {"pattern"}:
        schema["patternProperties"] = {names["pattern"]: rest}
    elif not named and meaning and meaning <= {"minLength", "maxLength"}:
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        schema["patternProperties"] = {rf"^[\s\S]{{{least},{most}}}$": rest}
    else:
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False


def _rewrite_numbers_of_properties(schema: dict[str, Any]) -> None:
    """Remove `minProperties` and `maxProperties` where other keywords imply them, and replace "one more than those that
    are required" by a choice of the further one.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    needed = {name for name in required if isinstance(name, str)}
    least, most = schema.get("minProperties"), schema.get("maxProperties")
    if isinstance(most, int) and is_closed and most >= len(properties):
        del schema["maxProperties"]
    if not isinstance(least, int):
        return
    optional = [name for name in properties if name not in needed]
    if least <= len(needed):
        del schema["minProperties"]
    elif is_closed and least == len(needed) + 1 and 0 < len(optional) <= _MAX_BRANCHES:
        del schema["minProperties"]
        _add_all_of(schema, [{"anyOf": [{"required": [name]} for name in optional]}])


def _add_all_of(schema: dict[str, Any], more: list[dict[str, Any]]) -> None:
    """Require some schemas in addition to what a schema says."""
    before = schema.get("allOf", [])
    if more and isinstance(before, list):
        schema["allOf"] = [*before, *more]


def _drop_what_says_nothing(schema: dict[str, Any]) -> None:
    """Remove unsupported keywords whose values have no effect, and normalize others."""
    for keyword in _SIZES:
        value = schema.get(keyword)
        if isinstance(value, float) and value.is_integer():
            schema[keyword] = value = int(value)
        if keyword.startswith("max") and numbers.is_number(value) and value >= ENDLESS:
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
    _rewrite_unevaluated(schema, "unevaluatedProperties", "additionalProperties", beside=CONDITIONS)
    _rewrite_unevaluated(schema, "unevaluatedItems", "items", beside=(*CONDITIONS, "contains", "additionalItems"))


def _rewrite_unevaluated(schema: dict[str, Any], keyword: str, additional: str, *, beside: tuple[str, ...]) -> None:
    """Replace `unevaluated...` by `additional...` if only the schema's own properties or items are evaluated."""
    if keyword not in schema:
        return
    if schema[keyword] is True or schema[keyword] == {}:
        del schema[keyword]
        if additional == "additionalProperties":
            schema.setdefault(additional, True)  # marks the object as not to be closed
    elif not any(name in schema for name in (*IN_PLACE, *beside)):
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
        allowed = types(own_type(schema))
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


def _may_be_equal(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _is_at_most_one(limit: Any) -> bool:
    return numbers.is_number(limit) and limit <= 1
