"""Llama 3: an answer that is `{"name": ..., "parameters": {...}}`, or has such an object after `<|python_tag|>`."""

from collections.abc import Sequence
from typing import ClassVar, override

from jaxserve.server.parsing.events import Content
from jaxserve.server.parsing.json_stream import CallReader
from jaxserve.server.parsing.tools import Spell, Tool, ToolParser, object_calls, repeated

_TAG = "<|python_tag|>"


class Llama3JsonParser(ToolParser):
    """An object at the very start is a call if it names one of the tools. Several are separated by semicolons."""

    markers: ClassVar[tuple[str, ...]] = (_TAG,)
    is_parallel: ClassVar[bool] = False  # the template refuses to show two

    @classmethod
    @override
    def rules(cls, tools: Sequence[Tool], *, template: str, spell: Spell, is_parallel: bool) -> str:
        calls = object_calls(tools, before="", after="", arguments="parameters")
        return repeated("; ", is_parallel=False) + "\n" + calls

    @override
    def _start(self) -> bool:
        text = self._buffer.lstrip()
        if not text and not self._is_last:
            return False
        if text.startswith("{"):
            self._raw = self._take(len(self._buffer) - len(text))
            self._begin_object()
        else:
            self._state = self._other
        return True

    def _other(self) -> bool:
        if self._show_until([_TAG]) is None:
            return False
        self._raw = _TAG
        self._begin_object()
        return True

    def _begin_object(self) -> None:
        self._reader = CallReader(self._tools)
        self._state = self._object

    def _object(self) -> bool:
        if not self._read_object():
            return False
        if self._reader.is_failed:
            self._emit(Content(self._raw + self._reader.raw))
            self._state = self._other
        else:
            self._state = self._after
        return True

    def _after(self) -> bool:
        self._skip_spaces()
        if not self._buffer and not self._is_last:
            return False
        if self._buffer.startswith(";"):
            self._raw = self._take(1)
            self._begin_object()
        else:
            self._state = self._other
        return True
