"""Reads gpt-oss: messages of several channels in one answer, in OpenAI's harmony format.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`: analysis is reasoning,
everything else is shown. A message to a tool that is offered, `to=functions.name`, is a call, its text the arguments;
one to another recipient is words or thoughts, according to its channel. Text outside messages is shown without the
marks around it.
"""

from collections.abc import Mapping
from typing import Any, override

import regex

from jaxserve.answers.literals.source import Steps, drop
from jaxserve.answers.literals.value import ValueReader
from jaxserve.answers.parsing.answer import AnswerReader
from jaxserve.answers.parsing.calls import read_arguments
from jaxserve.answers.parsing.events import Content, Reasoning
from jaxserve.answers.syntaxes.harmony import CHANNEL, CONSTRAIN, MARKS, MESSAGE, START

_MARK = regex.compile("|".join(regex.escape(mark) for mark in MARKS))
_RECIPIENT_FIRST = regex.compile(r"to=")
_RECIPIENT = regex.compile(r"(?:^|\s)to=(\S*)")
_CHANNEL = regex.compile(r"\s*(\w*)\s?")


class HarmonyReader(AnswerReader):
    """Takes reasoning, answer and calls apart."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], *, max_calls: int | None = None):
        """`tools` and `max_calls` as of any reader."""
        super().__init__(tools, max_calls=max_calls)
        self._kind: type[Content | Reasoning] = Content
        self._kinds: set[type] = set()  # kinds that have been reported; further messages begin on lines of their own
        self._is_new = True
        self._in_message = False

    @property
    @override
    def is_thinking(self) -> bool:
        return self._in_message and self._kind is Reasoning

    @property
    @override
    def may_think(self) -> bool:
        return True

    def _say(self, text: str) -> None:
        if self._is_new:
            if self._kinds and not self._in_message:
                text = text.lstrip()
            if not text:
                return
            if self._kind in self._kinds:
                text = "\n" + text
            self._kinds.add(self._kind)
            self._is_new = False
        self._events.append(self._kind(text))

    @override
    def _read_all(self) -> Steps:
        source = self._source
        spaces = yield from source.spaces()
        if (yield from source.peek(_RECIPIENT_FIRST)) is not None:
            yield from self._read_header("")
        elif (source.buffer and (yield from source.peek(_MARK)) is None) or (not source.buffer and spaces):
            self._say(spaces)
        while (mark := (yield from source.until(_MARK, self._say))) is not None:
            source.take(len(mark[0]))
            self._in_message = False
            if mark[0] == MESSAGE:
                self._begin("final")
            elif mark[0] in (START, CHANNEL, CONSTRAIN):
                yield from self._read_header(mark[0])
            else:
                self._begin("final")
                self._in_message = False

    def _begin(self, channel: str) -> None:
        """Text of a channel follows."""
        self._kind = Reasoning if channel == "analysis" else Content
        self._is_new = True
        self._in_message = True

    def _read_header(self, mark: str) -> Steps:
        """Read from after the first mark of a header to the end of its message's head, or of a call."""
        source = self._source
        channel, recipient = "final", ""
        while True:
            pieces: list[str] = []
            end = yield from source.until(_MARK, pieces.append)
            text = "".join(pieces)
            if found := _RECIPIENT.search(text):
                recipient = found[1]
            if mark == CHANNEL and (name := _CHANNEL.match(text)):
                channel, text = name[1], text[name.end() :]
            if end is None or end[0] not in (CHANNEL, CONSTRAIN, MESSAGE):
                break
            mark = end[0]
            source.take(len(end[0]))
            if mark == MESSAGE:
                text = ""
                break
        name = next((name for name in (recipient, recipient.removeprefix("functions.")) if name in self._tools), None)
        if mark == MESSAGE and name is not None:
            yield from self._read_call(name)
            return
        self._begin(channel)
        if mark != MESSAGE and not (source.is_last and source.is_cut):
            rest = _RECIPIENT.sub("", text).strip() if mark == CHANNEL else ""
            if rest:
                self._say(rest)
            self._in_message = False

    def _read_call(self, name: str) -> Steps:
        """Read the arguments of a call, which are all of its message."""
        source = self._source
        self._start_call(name)
        yield from read_arguments(
            source, self._argue, self._tools[name], lambda sink: ValueReader(source, sink), ends=_MARK
        )
        yield from source.until(_MARK, drop)
