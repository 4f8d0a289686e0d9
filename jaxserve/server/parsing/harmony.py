"""gpt-oss: messages of several channels in one answer, as OpenAI's harmony format has them.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`: analysis is reasoning, final
is the answer, commentary is shown too. A message to a tool, `to=functions.name`, is a call, its text the arguments.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, override

from jaxserve.server.parsing.events import CallArguments, Content, Reasoning
from jaxserve.server.parsing.tools import Spell, Tool, ToolParser, literal
from jaxserve.structured.grammar import json_rule

_START, _END, _MESSAGE, _CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
_CONSTRAIN, _CALL, _RETURN = "<|constrain|>", "<|call|>", "<|return|>"
_ENDS = (_END, _CALL, _RETURN, _START)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w*)")


class HarmonyParser(ToolParser):
    """Takes reasoning, answer and calls apart. Text without any channel is the answer."""

    markers: ClassVar[tuple[str, ...]] = (_START, _END, _MESSAGE, _CHANNEL, _CONSTRAIN, _CALL, _RETURN)
    trigger: ClassVar[str | None] = _CHANNEL  # of every message
    is_parallel: ClassVar[bool] = False  # a call ends the answer

    def __init__(self, tools: Mapping[str, dict[str, Any]]):
        super().__init__(tools)
        self._kind: type[Content | Reasoning | CallArguments] = Content
        self._seen: set[type] = set()

    @classmethod
    @override
    def rules(cls, tools: Sequence[Tool], *, template: str, spell: Spell, is_parallel: bool) -> str:
        calls = [
            " ".join(
                (
                    spell(_CHANNEL),
                    literal(f"commentary to=functions.{tool.name} "),
                    spell(_CONSTRAIN),
                    literal("json"),
                    spell(_MESSAGE),
                    json_rule(tool.parameters),
                )
            )
            for tool in tools
        ]
        return "calls: " + "\n    | ".join(calls)

    @classmethod
    def message_rules(cls, spell: Spell, answer: str) -> str:
        """Lark rules for messages: `analysis`, thoughts, and `preamble`, words before a call, both with the beginning
        of the next message; and `final`, to the reader, whose text is the rule `answer`.
        """
        begin, end = spell(_CHANNEL), f"{spell(_END)} {spell(_START)} {literal('assistant')}"
        return "\n".join(
            (
                f"analysis: {begin} {literal('analysis')} {spell(_MESSAGE)} HARMONY_TEXT {end}",
                f"preamble: {begin} {literal('commentary')} {spell(_MESSAGE)} HARMONY_TEXT {end}",
                f"final: {begin} {literal('final')} {spell(_MESSAGE)} {answer}",
                "HARMONY_TEXT: /(.|\\n)*/",
            )
        )

    @property
    @override
    def is_thinking(self) -> bool:
        """Whether what comes now is reasoning."""
        return self._state == self._body and self._kind is Reasoning

    @property
    @override
    def has_thought(self) -> bool:
        """Whether no more thoughts can come: any message may be one."""
        return False

    @override
    def _start(self) -> bool:
        """The beginning of the answer: a header without its `<|start|>assistant`, or no header at all."""
        text = self._buffer.lstrip()
        heads = (_CHANNEL, _START, "to=")
        if any(text.startswith(head) for head in heads):
            self._state = self._header
        elif not self._is_last and any(head.startswith(text) for head in heads):
            return False
        else:
            self._state = self._body
        return True

    def _header(self) -> bool:
        position = self._buffer.find(_MESSAGE)
        if position < 0:
            return False  # an unfinished header says nothing
        header = self._take(position)
        self._take(len(_MESSAGE))
        channel = match[1] if (match := _CHANNEL_NAME.search(header)) else "final"
        if recipient := _RECIPIENT.search(header):
            self._start_call(recipient[1].removeprefix("functions."))
            self._kind = CallArguments
        else:
            self._begin(Reasoning if channel == "analysis" else Content)
        self._state = self._body
        return True

    def _begin(self, kind: type[Content | Reasoning]) -> None:
        """Messages of one kind are put on lines of their own."""
        self._kind = kind
        if kind in self._seen:
            self._emit(kind("\n"))
        self._seen.add(kind)

    def _body(self) -> bool:
        text, marker = self._take_until(_ENDS)
        if text:
            self._emit(self._kind(text))
        if marker is None:
            return False
        self._state = self._header
        return True
