"""Reads arguments that are elements, with elements inside for objects and lists, and passes them on as JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.answers.literals.schema import Kind, inner_kind, json_value
from jaxserve.answers.literals.source import Sink, Source, Steps
from jaxserve.answers.parsing.marks import Marks

MAX_DEPTH = 64
"""Most elements in one another; tags of further ones are text."""


@dataclass
class _Element:
    """An element from `start` to `end` in the text, without its tags."""

    name: str
    start: int = 0
    end: int = 0
    inner: list["_Element"] = field(default_factory=list)


class ElementReader:
    """Reads the arguments of one call. Their types are known only when all are there: they are passed on at once."""

    def __init__(self, source: Source, sink: Sink, marks: Marks, schema: Mapping[str, Any]):
        """Read by the `schema` of the tool's parameters."""
        self._source = source
        self._sink = sink
        self._marks = marks
        self._schema = schema
        self._text = ""

    def read(self) -> Steps:
        """Read to what ends the call."""
        source = self._source
        pieces: list[str] = []
        yield from source.until(self._marks.elements_end, pieces.append)
        if not source.is_cut or source.buffer:
            self._text = "".join(pieces)
            self._sink(self._written(self._parsed(), self._schema, Kind(frozenset({"object"}))))

    def _parsed(self) -> _Element:
        """Return the text as an element. A tag that ends no element that is open is text; missing ones are added."""
        opened = [_Element("")]
        for tag in self._marks.element_tag.finditer(self._text):
            name = tag["name"]
            if not tag["slash"] and len(opened) <= MAX_DEPTH:
                opened[-1].inner.append(_Element(name, tag.end(), len(self._text)))
                opened.append(opened[-1].inner[-1])
            elif tag["slash"] and any(each.name == name for each in opened[1:]):
                while opened[-1].name != name:
                    opened.pop().end = tag.start()
                opened.pop().end = tag.start()
        opened[0].end = len(self._text)
        return opened[0]

    def _written(self, element: _Element, schema: Any, kind: Kind) -> str:
        """Return an element's value in JSON."""
        has_parts = not kind.types or kind.types & {"array", "object"}
        if element.name and not (element.inner and has_parts):
            return json_value(self._text[element.start : element.end], kind)
        names = [each.name for each in element.inner]
        if {*names} == {"item"}:
            is_list = not kind.types or "array" in kind.types
        else:
            is_list = "array" in kind.types and "object" not in kind.types
        inner = {name: inner_kind(self._schema, schema, None if is_list else name) for name in names}
        values = [self._written(each, *inner[each.name]) for each in element.inner]
        if is_list:
            return f"[{', '.join(values)}]"
        items = [f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in zip(names, values, strict=True)]
        return f"{{{', '.join(items)}}}"
