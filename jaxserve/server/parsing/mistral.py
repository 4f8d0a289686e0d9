"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`; newer models write `[TOOL_CALLS]name[ARGS]{...}`."""

import secrets
import string
from collections.abc import Sequence
from typing import ClassVar, override

from jaxserve.server.parsing.events import Content
from jaxserve.server.parsing.json_stream import CallReader
from jaxserve.server.parsing.tools import Spell, Tool, ToolParser, literal, object_calls
from jaxserve.structured.grammar import json_rule

_ID_CHARACTERS = string.ascii_letters + string.digits
_CALLS, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralParser(ToolParser):
    """One marker begins a list of calls, or one call each."""

    markers: ClassVar[tuple[str, ...]] = (_CALLS, _ARGS, _ID)
    trigger: ClassVar[str | None] = _CALLS

    @classmethod
    @override
    def rules(cls, tools: Sequence[Tool], *, template: str, spell: Spell, is_parallel: bool) -> str:
        if _ARGS in template:
            calls = [f"{spell(_CALLS)} {literal(t.name)} {spell(_ARGS)} {json_rule(t.parameters)}" for t in tools]
            return f"calls: call{'+' if is_parallel else ''}\ncall: " + "\n    | ".join(calls)
        more = f" ({literal(', ')} call)*" if is_parallel else ""
        calls = f"calls: {spell(_CALLS)} {literal('[')} call{more} {literal(']')}"
        return calls + "\n" + object_calls(tools, before="", after="")

    @classmethod
    @override
    def new_id(cls) -> str:
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))  # the template accepts nothing else

    @override
    def _start(self) -> bool:
        if self._show_until([_CALLS]) is None:
            return False
        self._raw = _CALLS
        self._state = self._list_or_name
        return True

    def _list_or_name(self) -> bool:
        text = self._buffer.lstrip()
        if not text and not self._is_last:
            return False
        if text.startswith("["):
            self._raw += self._take(len(self._buffer) - len(text) + 1)
            self._begin_object()
        else:
            self._state = self._name
        return True

    def _begin_object(self) -> None:
        self._reader = CallReader()
        self._state = self._object

    def _object(self) -> bool:
        if not self._read_object():
            return False
        if self._reader.is_failed:
            self._emit(Content(self._raw + self._reader.raw))
            self._state = self._start
        else:
            self._state = self._after_object
        return True

    def _after_object(self) -> bool:
        self._skip_spaces()
        if not self._buffer and not self._is_last:
            return False
        if self._buffer.startswith(","):
            self._raw = self._take(1)
            self._begin_object()
        else:
            self._buffer = self._buffer.removeprefix("]")
            self._state = self._start
        return True

    def _name(self) -> bool:
        """`name{`, `name[ARGS]{` or `name[CALL_ID]id[ARGS]{`."""
        end = self._buffer.find("{")
        if end < 0 and not self._is_last:
            return False
        header = self._take(len(self._buffer) if end < 0 else end)
        name = header.split("[")[0].strip()
        if end < 0 or not name:
            self._emit(Content(self._raw + header))
            self._state = self._start
        else:
            self._start_call(name)
            self._state = self._arguments
        return True

    def _arguments(self) -> bool:
        if not self._read_value():
            return False
        self._state = self._start
        return True
