"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once for each call."""

from collections.abc import Sequence
from typing import ClassVar, override

from jaxserve.server.parsing.events import Content
from jaxserve.server.parsing.json_stream import CallReader
from jaxserve.server.parsing.tools import Spell, Tool, ToolParser, literal, object_calls, repeated

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """A call is a JSON object between two tags."""

    markers: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)
    trigger: ClassVar[str | None] = OPEN

    @classmethod
    @override
    def rules(cls, tools: Sequence[Tool], *, template: str, spell: Spell, is_parallel: bool) -> str:
        before, after = f"{spell(OPEN)} {literal('\n')}", f"{literal('\n')} {spell(CLOSE)}"
        return repeated("\n", is_parallel=is_parallel) + "\n" + object_calls(tools, before=before, after=after)

    @override
    def _start(self) -> bool:
        if self._show_until([OPEN]) is None:
            return False
        self._reader = CallReader()
        self._state = self._call
        return True

    def _call(self) -> bool:
        if not self._read_object():
            return False
        if self._reader.is_failed:
            self._emit(Content(OPEN + self._reader.raw))
            self._state = self._start
        else:
            self._state = self._close
        return True

    def _close(self) -> bool:
        self._skip_spaces()
        if self._may_become(CLOSE):
            return False
        self._buffer = self._buffer.removeprefix(CLOSE)
        self._state = self._start
        return True
