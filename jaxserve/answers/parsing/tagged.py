"""Reads arguments between tags, one by one, as JSON: an end tag may be missing, or be misspelled."""

import json
from collections.abc import Callable, Generator, Mapping
from typing import Any

import regex

from jaxserve.answers.literals.schema import Kind, json_value, keys_of, property_kind, property_names
from jaxserve.answers.literals.source import Sink, Source, Steps, drop
from jaxserve.answers.literals.value import to_json
from jaxserve.answers.parsing.marks import Marks

_LINE_BREAK = regex.compile("\n")
_CDATA, _CDATA_END = regex.compile(r"\s{0,8}<!\[CDATA\["), regex.compile(r"\]\]>")
_WRAPPERS = ("arguments", "parameters", "properties", "input")
_ANY_BUT_TEXT = Kind(frozenset(("null", "boolean", "integer", "number", "array", "object")))


class TaggedReader:
    """Reads the arguments of one call, and passes them on as an object. Text that belongs to none is left out."""

    def __init__(
        self,
        source: Source,
        sink: Sink,
        marks: Marks,
        schema: Mapping[str, Any],
        *,
        is_offered: Callable[[str], bool],
    ):
        """Read by the `schema` of the tool's parameters; a call of a tool that `is_offered` ends a value."""
        self._source = source
        self._sink = sink
        self._marks = marks
        self._schema = schema
        self._is_offered = is_offered

    def read(self) -> Steps:
        """Read to what ends the call."""
        source, marks, tags = self._source, self._marks, self._marks.tags
        self._sink("{")
        comma = ""
        while True:
            match = yield from source.until(marks.key, drop)
            if match is None or match.lastgroup != "key":
                self._sink("" if source.is_cut else "}")
                return
            source.take(len(match[0]))
            key = yield from source.accept(marks.key_end)
            if key is None:
                continue
            written = key["key"]
            if tags.has_entities:
                written = written.replace("&quot;", '"').replace("&amp;", "&")
            name = json.dumps(written, ensure_ascii=False)
            kind = property_kind(self._schema, written)
            if tags.text_flag and key["flag"] not in (None, tags.flags[0]) and not kind.types:
                kind = _ANY_BUT_TEXT
            names = property_names(self._schema)
            if written in _WRAPPERS and names and written not in names:
                pieces: list[str] = []
                is_whole = yield from self._read_value(kind, pieces.append)
                items = _items("".join(pieces), names) if is_whole else ""
                self._sink(comma + (items or f"{name}: {''.join(pieces)}"))
            else:
                self._sink(f"{comma}{name}: ")
                yield from self._read_value(kind, self._sink)
            comma = ", "
            if source.is_cut and not source.buffer:
                return

    def _read_value(self, kind: Kind, sink: Sink) -> Generator[None, None, bool]:
        """Read one value to its end tag, or to the tag that follows where it has none, and pass it on as JSON. Returns
        False if the text is cut before.
        """
        source, marks, tags = self._source, self._marks, self._marks.tags
        if tags.value[0].strip() and not tags.text_flag:
            yield from source.spaces()
            yield from source.accept(marks.value)
        pads = tags.value[1].startswith("\n")
        if pads:
            yield from source.accept(_LINE_BREAK)
        is_text = kind.is_text and not kind.values
        held, pieces = "", []

        def tell(text: str, *, is_all: bool = False) -> None:
            nonlocal held
            text = held + text
            held = "\n" if text.endswith("\n") and not is_all else ""  # it may belong to the end tag
            text = text[: len(text) - len(held)]
            if is_text:
                sink(json.dumps(text, ensure_ascii=False)[1:-1])
            else:
                pieces.append(text)

        sink('"' if is_text else "")
        if tags.has_cdata and (yield from source.accept(_CDATA)) is not None:
            yield from source.until(_CDATA_END, lambda text: tell(text, is_all=True))
            source.take(3)
            yield from source.until(marks.value_end, drop)
        while True:
            match = yield from source.until(marks.value_end, tell)
            if match is None or match.lastgroup != "head" or self._is_offered(match["name"]):
                break
            tell(source.take(1))
        if match is None and source.is_cut:
            return False
        if match is not None and match.lastgroup == "value":
            source.take(len(match[0]))
            tell("", is_all=not pads)
        sink('"' if is_text else json_value("".join(pieces), kind))
        return True


def _items(value: str, names: list[str]) -> str:
    """Return the items of an object in JSON, or in a text, which all have one of these names; "" if it is none."""
    found = to_json(json.loads(value) if value.startswith('"') else value) or ""
    keys = keys_of(found)
    return found.strip()[1:-1].strip() if keys and keys <= {*names} else ""
