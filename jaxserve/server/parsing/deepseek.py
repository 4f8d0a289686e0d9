"""DeepSeek V3 and R1, which put arguments into a ```json block, and V3.1, which does not; between special tokens."""

# ruff: noqa: RUF001 (the tokens are spelled with full-width bars)

from collections.abc import Sequence
from typing import ClassVar, override

from jaxserve.server.parsing.events import Content
from jaxserve.server.parsing.tools import Spell, Tool, ToolParser, literal
from jaxserve.structured.grammar import json_rule

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekParser(ToolParser):
    """Reads both: "function", the separator, the name and a block; or the name, the separator and the arguments."""

    markers: ClassVar[tuple[str, ...]] = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR)
    trigger: ClassVar[str | None] = _CALLS

    @classmethod
    @override
    def rules(cls, tools: Sequence[Tool], *, template: str, spell: Spell, is_parallel: bool) -> str:
        has_block = "```json" in template
        calls = []
        for tool in tools:
            head = [literal("function"), spell(_SEPARATOR), literal(f"{tool.name}\n```json\n")]
            block = [*head, json_rule(tool.parameters), literal("\n```")]
            plain = [literal(tool.name), spell(_SEPARATOR), json_rule(tool.parameters)]
            calls.append(" ".join([spell(_CALL), *(block if has_block else plain), spell(_CALL_END)]))
        between = literal("\n") + " " if has_block else ""
        more = f" ({between}call)*" if is_parallel else ""
        return f"calls: {spell(_CALLS)} call{more} {spell(_CALLS_END)}\ncall: " + "\n    | ".join(calls)

    @override
    def _start(self) -> bool:
        if self._show_until([_CALLS]) is None:
            return False
        self._raw = _CALLS
        self._state = self._between
        return True

    def _between(self) -> bool:
        """Before a call, or after the last one."""
        before, marker = self._take_until([_CALL, _CALLS_END])
        self._raw = "" if self.has_calls else self._raw + before
        if marker is None:
            if self._is_last and self._raw:
                self._emit(Content(self._raw))
                self._raw = ""
            return False
        if marker == _CALL:
            self._raw += _CALL
            self._state = self._head
        else:
            self._state = self._start
        return True

    def _head(self) -> bool:
        """What stands before the separator: the name, or "function"."""
        position = self._buffer.find(_SEPARATOR)
        if position < 0:
            return self._give_up() if self._is_last else False
        head = self._buffer[:position]
        text = self._buffer[position + len(_SEPARATOR) :].lstrip()
        if not text and not self._is_last:
            return False
        if text.startswith("{"):
            self._buffer = text
            self._start_call(head.strip())
            self._state = self._arguments
        else:
            self._take(position + len(_SEPARATOR))
            self._raw += head + _SEPARATOR
            self._state = self._name
        return True

    def _name(self) -> bool:
        """The name, and the head of the block."""
        position = self._buffer.find("{")
        if position < 0:
            return self._give_up() if self._is_last else False
        self._start_call(self._take(position).split("```")[0].strip())
        self._state = self._arguments
        return True

    def _give_up(self) -> bool:
        """The text has ended before a tool was named."""
        self._emit(Content(self._raw + self._take(len(self._buffer))))
        self._state = self._start
        return False

    def _arguments(self) -> bool:
        if not self._read_value():
            return False
        self._state = self._between
        return True
