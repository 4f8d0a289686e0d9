"""Qwen3-Coder and GLM 4.5, which write each argument between tags of its own, and texts without quotes.

    <tool_call>                                   <tool_call>get_weather
    <function=get_weather>                        <arg_key>city</arg_key>
    <parameter=city>                              <arg_value>Oslo</arg_value>
    Oslo                                          </tool_call>
    </parameter>
    </function>
    </tool_call>

What a value is, only the tool's schema says (`typed_value`). A call that is forced is written as Hermes' object, which
these parsers read too: between tags no grammar could hold a text to its schema.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar, override

from jaxserve.server.parsing.events import CallArguments, Content
from jaxserve.server.parsing.hermes import CLOSE, OPEN, HermesParser
from jaxserve.server.parsing.json_stream import CallReader
from jaxserve.server.parsing.typed_value import json_value, value_types

_NAME = re.compile(r"[\w.-]{1,64}")


class _TaggedParser(HermesParser):
    """The way through a call that both have in common. Subclasses say how a name, a key and a value begin and end.

    Class attributes:
        opening: what a call begins with, apart from `<tool_call>`; a model may leave that out.
        ends: what may stand after the last argument.
        key: what a key stands between.
        value: what a value stands between; with `pads`, on lines of its own.
    """

    trigger: ClassVar[str | None] = None  # unforced, the model writes tags
    opening: ClassVar[str] = ""
    ends: ClassVar[tuple[str, ...]] = (CLOSE,)
    key: ClassVar[tuple[str, str]]
    value: ClassVar[tuple[str, str]]
    pads: ClassVar[bool] = False

    def __init__(self, tools: Mapping[str, dict[str, Any]]):
        super().__init__(tools)
        self._schema: dict[str, Any] = {}
        self._types: frozenset[str] = frozenset()
        self._value = ""
        self._has_arguments = False

    @override
    def _start(self) -> bool:
        marker = self._show_until([OPEN, self.opening] if self.opening else [OPEN])
        if marker is None:
            return False
        self._raw = marker
        self._state = self._inside if marker == OPEN else self._name
        return True

    def _inside(self) -> bool:
        """After `<tool_call>`: an object, or a name."""
        text = self._buffer.lstrip()
        if not self._is_last and len(text) < max(1, len(self.opening)) and self.opening.startswith(text):
            return False
        if text.startswith("{"):
            self._reader = CallReader()
            self._state = self._call
        elif text.startswith(self.opening):
            self._raw += self._take(len(self._buffer) - len(text) + len(self.opening))
            self._state = self._name
        else:
            self._give_up()
        return True

    def _give_up(self) -> None:
        """This is no call."""
        self._emit(Content(self._raw))
        self._raw = ""
        self._state = self._start

    def _name(self) -> bool:
        """A name ends where its line or its tag does, or with the next tag."""
        end = min((place for stop in ">\n<" if (place := self._buffer.find(stop)) >= 0), default=-1)
        if end < 0 and not self._is_last:
            return False
        name = self._take(len(self._buffer) if end < 0 else end)
        self._raw += name
        if end < 0 or _NAME.fullmatch(name.strip()) is None:
            self._give_up()
            return True
        self._buffer = self._buffer.removeprefix(">")
        self._start_call(name.strip())
        self._schema = self._tools.get(name.strip(), {})
        self._has_arguments = False
        self._emit(CallArguments("{"))
        self._state = self._next
        return True

    def _next(self) -> bool:
        """Between two arguments, or after the last one. What belongs to neither is left out."""
        _, marker = self._take_until([self.key[0], *self.ends])
        if marker is None:
            return False
        if marker == self.key[0]:
            self._state = self._key
        else:
            self._emit(CallArguments("}"))
            self._state = self._start if marker == CLOSE else self._close
        return True

    def _key(self) -> bool:
        end = self._buffer.find(self.key[1])
        if end < 0:
            return False
        key = self._take(end).strip()
        self._take(len(self.key[1]))
        separator = ", " if self._has_arguments else ""
        self._has_arguments = True
        self._emit(CallArguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: "))
        self._types = value_types(self._schema, key)
        self._state = self._before_value
        return True

    def _before_value(self) -> bool:
        opening = self.value[0]
        if opening:
            self._skip_spaces()
            if self._may_become(opening):
                return False
            self._buffer = self._buffer.removeprefix(opening)
        elif not self._buffer and not self._is_last:
            return False
        if self.pads:
            self._buffer = self._buffer.removeprefix("\n")
        self._value = ""
        is_text = self._types == {"string"}
        if is_text:
            self._emit(CallArguments('"'))
        self._state = self._text if is_text else self._other
        return True

    def _text(self) -> bool:
        """A value that is certainly a text is shown as it comes."""
        text, marker = self._take_until([self.value[1]])
        if self.pads and text.endswith("\n"):
            text = text[:-1]
            if marker is None and not self._is_last:
                self._buffer = "\n" + self._buffer
        self._emit(CallArguments(json.dumps(text, ensure_ascii=False)[1:-1]))
        if marker is None:
            return False
        self._emit(CallArguments('"'))
        self._state = self._next
        return True

    def _other(self) -> bool:
        """Any other value is known when it is complete."""
        text, marker = self._take_until([self.value[1]])
        self._value += text
        if marker is None:
            return False
        value = self._value.removesuffix("\n") if self.pads else self._value
        self._emit(CallArguments(json_value(value, self._types)))
        self._state = self._next
        return True


class Qwen3CoderParser(_TaggedParser):
    """`<function=name>`, and `<parameter=key>` with its value on lines of its own."""

    opening: ClassVar[str] = "<function="
    ends: ClassVar[tuple[str, ...]] = ("</function>", CLOSE)
    key: ClassVar[tuple[str, str]] = ("<parameter=", ">")
    value: ClassVar[tuple[str, str]] = ("", "</parameter>")
    pads: ClassVar[bool] = True


class Glm45Parser(_TaggedParser):
    """The name behind the tag, then pairs of `<arg_key>` and `<arg_value>`."""

    markers: ClassVar[tuple[str, ...]] = (OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    key: ClassVar[tuple[str, str]] = ("<arg_key>", "</arg_key>")
    value: ClassVar[tuple[str, str]] = ("<arg_value>", "</arg_value>")
