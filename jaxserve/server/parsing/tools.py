"""What every syntax of tool calls has: a parser of what the model writes, and a grammar that makes it write a call."""

import abc
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from jaxserve.server.parsing.events import CallArguments, CallStart, Content
from jaxserve.server.parsing.json_stream import CallReader, ValueScanner
from jaxserve.server.parsing.stream import StreamParser
from jaxserve.structured.grammar import json_rule


class Tool(NamedTuple):
    """A function that the model may call; `parameters` is a JSON schema, `is_strict`: every call must follow it."""

    name: str
    parameters: dict[str, Any]
    is_strict: bool = False


Spell = Callable[[str], str]
"""How a grammar writes a marker: as one token where the tokenizer has it so, else as text."""


class ToolParser(StreamParser, abc.ABC):
    """Tells tool calls from other text.

    White space between other text and a call, or between two calls, belongs to neither and is dropped. What looked like
    a call and is none is shown as it stands, up to where its tool's name is known.

    Class attributes:
        markers: texts that the parser must see even if they are special tokens.
        is_parallel: whether the model may write several calls in one answer.
        trigger: the marker that every call begins with, if none is ever written otherwise; None: there is no such.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    is_parallel: ClassVar[bool] = True
    trigger: ClassVar[str | None] = None

    def __init__(self, tools: Mapping[str, dict[str, Any]]):
        """`tools` are the parameters of those that may be called, by name."""
        super().__init__()
        self._tools = tools
        self.has_calls = False
        self._reader = CallReader()
        self._scanner = ValueScanner()
        self._raw = ""  # what would be shown, were this no call

    @classmethod
    @abc.abstractmethod
    def rules(cls, tools: Sequence[Tool], *, template: str, spell: Spell, is_parallel: bool) -> str:
        """Lark rules of which `calls` is one call of these tools, or several. `template` is the model's."""

    @classmethod
    def new_id(cls) -> str:
        """An id for a call, as this model's template takes it back."""
        return f"call_{secrets.token_hex(12)}"

    def _show_until(self, markers: Sequence[str]) -> str | None:
        """Show other text up to a marker, which is returned; None if there is none yet. White space before it is held
        back until it is clear what follows.
        """
        before, marker = self._take_until(markers)
        shown = before.rstrip()
        if marker is None:
            if not self._is_last:
                self._buffer = before[len(shown) :] + self._buffer
            elif not self.has_calls:
                shown = before
        if shown:
            self._emit(Content(shown))
        return marker

    def _start_call(self, name: str) -> None:
        self.has_calls = True
        self._emit(CallStart(name))
        self._scanner = ValueScanner()

    def _read_object(self) -> bool:
        """Let the reader have the buffer. Returns whether it is through, or the text has ended."""
        events, self._buffer = self._reader.push(self._buffer)
        for event in events:
            self._emit(event)
        self.has_calls |= self._reader.has_started
        if self._is_last and not self._reader.is_done:
            self._reader.is_failed = not self._reader.has_started
        return self._reader.is_done or self._reader.is_failed or self._is_last

    def _read_value(self) -> bool:
        """Emit the buffer as arguments, up to their end. Returns whether this has been reached."""
        end = self._scanner.push(self._buffer)
        text = self._take(len(self._buffer) if end is None else end)
        self._emit(CallArguments(text))
        return end is not None


def literal(text: str) -> str:
    """A text in a Lark rule."""
    return json.dumps(text, ensure_ascii=False)


def object_calls(tools: Sequence[Tool], *, before: str, after: str, arguments: str = "arguments") -> str:
    """The rule `call`: an object that calls one of the tools, between two parts of a rule."""
    alternatives = [
        " ".join(
            part
            for part in (
                before,
                literal(f'{{"name": {json.dumps(tool.name)}, "{arguments}": '),
                json_rule(tool.parameters),
                literal("}"),
                after,
            )
            if part
        )
        for tool in tools
    ]
    return "call: " + "\n    | ".join(alternatives)


def repeated(separator: str, *, is_parallel: bool) -> str:
    """The rule `calls` from the rule `call`."""
    return f"calls: call ({literal(separator)} call)*" if is_parallel else "calls: call"
