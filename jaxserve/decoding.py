"""From JSON to structs, with errors in the words of the other checks: which field, what it must be, what it is."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import inspect

from jaxserve.errors import InvalidRequest
from jaxserve.values import rule

BODY = "the request body"

VISIBLE = r"^[!-~]{1,128}$(?!\n)"
"""Texts that are safe in a header and in a log line: the only pattern that fields have."""

_EXPECTED = {
    **{kind.__name__: rule(kind).words for kind in (int, float, str)},
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_GOT = {**_EXPECTED, "bool": "a boolean", "null": "null"}


def decoded(body: bytes, kind: Any, *, what: str = BODY) -> Any:
    """Return the JSON `body`, which errors call `what`, as `kind`.

    Raises InvalidRequest for malformed JSON and for a wrong type, which names the field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), kind, what=what, param="") from None
    except RecursionError:
        raise InvalidRequest(f"{what} is nested too deeply") from None
    except (msgspec.DecodeError, ValueError) as error:  # ValueError: not UTF-8, numbers of thousands of digits
        place = re.search(r"\(byte \d+\)", str(error))
        raise InvalidRequest(f"{what} is not valid JSON{f' {place[0]}' if place else ''}") from None


def converted[T](value: Any, kind: type[T], param: str = "") -> T:
    """Return plain JSON data, the value of the field `param`, as `kind`. Raises InvalidRequest, naming the field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), kind, what=BODY, param=param) from None


def _refusal(message: str, kind: Any, *, what: str, param: str) -> InvalidRequest:
    """Make the error of msgspec's "<problem> - at `$.a.b[0]`", or "... - at `key` in `$.a`"."""
    problem, _, location = message.partition(" - at ")
    path = re.sub(r"^.*`\$\.?|`$|\[\.\.\.\]", "", location)
    param = f"{param}.{path}" if param and path else param or path
    name = f"a value of {param}" if location.endswith("[...]`") else param or what
    name = f"a key of {param}" if location.startswith("`key` in ") else name
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", problem):
        param = f"{param}.{missing[1]}" if param else missing[1]
        text = f"{param}: this field is required"
    elif unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem, re.DOTALL):
        text = f"{name}: the field {unknown[1]!r} is not supported"
    elif problem.endswith(" of length >= 1"):
        text = f"{name} must not be empty"
    elif expected := re.fullmatch(r"Expected `([^`]*)`(.*?)(?:, got `(\w+)`)?", problem):
        words = " or ".join(_EXPECTED.get(each, each) for each in expected[1].split(" | ") if each != "null")
        got = f", got {_GOT.get(expected[3], expected[3])}" if expected[3] else ""
        limit = expected[2]
        if limit.startswith(" of length <= "):
            limit = f" of at most {limit.split()[-1]} {'characters' if expected[1] == 'str' else 'entries'}"
        elif limit.startswith(" matching regex"):
            limit = " of 1 to 128 visible ASCII characters"
        text = f"{name} must be {words}{limit}{got}"
    elif value := re.fullmatch(r"Invalid enum value (.*)", problem, re.DOTALL):
        choices = list(map(str, _choices(inspect.type_info(kind), re.findall(r"\w+|\[", path))))
        one_of = "one of " if len(choices) > 1 else ""
        text = f"{name} must be {one_of}{', '.join(choices)}, got {value[1]:.100}"
    elif problem == "Number out of range":
        text = f"{name} is out of range"
    else:
        text = f"{name}: {problem}"
    return InvalidRequest(text, param=param or None)


def _choices(declared: inspect.Type, steps: Sequence[str]) -> Iterator[Any]:
    """Yield the values that are allowed at a path, of which a step is a field's name, or "[" for an entry of a list."""
    match declared:
        case inspect.Metadata():
            yield from _choices(declared.type, steps)
        case inspect.UnionType():
            for each in declared.types:
                yield from _choices(each, steps)
        case inspect.LiteralType() if not steps:
            yield from declared.values
        case inspect.ListType() if steps and steps[0] == "[":
            yield from _choices(declared.item_type, steps[2:])
        case inspect.DictType():
            yield from _choices(declared.value_type, steps)
        case inspect.StructType() if steps:
            for field in declared.fields:
                if field.encode_name == steps[0]:
                    yield from _choices(field.type, steps[1:])
        case _:
            pass
