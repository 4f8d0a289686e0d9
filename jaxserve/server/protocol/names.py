"""Find names of fields, in a request and its nested objects, that the protocol's structs do not have.

msgspec ignores them. Free-form objects, such as a JSON schema or metadata, are not checked.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from jaxserve.decoding import decoded

MAX_OBJECTS = 4096
"""Maximum objects of a request whose names are checked, which takes some 10 ms of the event loop."""

STRUCTS = "structs"
"""Key in the `extra` of a `msgspec.Meta`: the structs that define the names of an object that is kept as a dict."""


class UnknownName(NamedTuple):
    """`path` leads to the object with the name, such as 'messages[].'; `known` are the names that it may have."""

    path: str
    name: str
    known: frozenset[str]


class _Shape(NamedTuple):
    """The names to check in a value: of an object, its values by `names`; of a list, its `entries`. Empty if there are
    none.
    """

    names: Mapping[str, "_Shape"] = {}
    entries: "_Shape | None" = None

    def merged(self, other: "_Shape") -> "_Shape":
        """Return the shape of a value that may have either shape."""
        names = {**self.names}
        for name, shape in other.names.items():
            names[name] = names[name].merged(shape) if name in names else shape
        if self.entries is None or other.entries is None:
            return _Shape(names, self.entries or other.entries)
        return _Shape(names, self.entries.merged(other.entries))


def unknown_names(body: bytes, kind: type[msgspec.Struct]) -> list[UnknownName]:
    """Return the unknown names in a `body` that has been decoded as `kind`, in order. Raises InvalidRequest for names
    that are not UTF-8, which msgspec ignores, too.
    """
    return list(_Search().look(decoded(body, msgspec.Raw), _shape_of_struct(kind), ""))


class _Search:
    """One search through a request. Values are decoded only where they have names to be checked."""

    def __init__(self) -> None:
        self._objects_left = MAX_OBJECTS

    def look(self, value: msgspec.Raw, shape: _Shape, path: str) -> Iterator[UnknownName]:
        first = bytes(memoryview(value)[:1])
        if first == b"{" and shape.names and self._objects_left > 0:
            self._objects_left -= 1
            dotted = f"{path}." if path else ""
            for name, entry in decoded(bytes(value), dict[str, msgspec.Raw]).items():
                inner = shape.names.get(name)
                if inner is None:
                    yield UnknownName(dotted, name, frozenset(shape.names))
                elif inner.names or inner.entries:
                    yield from self.look(entry, inner, dotted + name)
        elif first == b"[" and shape.entries is not None:
            for entry in decoded(bytes(value), list[msgspec.Raw]):
                if self._objects_left <= 0:
                    return
                yield from self.look(entry, shape.entries, f"{path}[]")


@functools.cache
def _shape_of_struct(kind: type[msgspec.Struct]) -> _Shape:
    declared = inspect.type_info(kind)
    assert isinstance(declared, inspect.StructType), kind
    return _Shape({field.encode_name: _shape_of(field.type) for field in declared.fields})


def _shape_of(declared: inspect.Type) -> _Shape:
    match declared:
        case inspect.StructType():
            return _shape_of_struct(declared.cls)
        case inspect.ListType():
            entries = _shape_of(declared.item_type)
            return _Shape(entries=entries) if entries.names or entries.entries else _Shape()
        case inspect.UnionType():
            return _merged([_shape_of(each) for each in declared.types])
        case inspect.Metadata() if STRUCTS in (declared.extra or {}):
            structs: Any = (declared.extra or {})[STRUCTS]
            return _merged([_shape_of_struct(each) for each in structs])
        case inspect.Metadata():
            return _shape_of(declared.type)
        case _:
            return _Shape()


def _merged(shapes: list[_Shape]) -> _Shape:
    return functools.reduce(lambda merged, shape: merged.merged(shape), shapes, _Shape())
