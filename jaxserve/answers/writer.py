"""Chat choices made from engine outputs: thoughts, text and calls in the format that clients expect."""

from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec import UNSET

from jaxserve.answers.message import AssistantMessage, ChatFinishReason, Delta
from jaxserve.answers.parsing.answer import AnswerReader
from jaxserve.answers.parsing.events import CallArguments, CallStart, Content, Event, Reasoning, joined
from jaxserve.answers.parsing.thought_counter import ReasoningCounter
from jaxserve.answers.tools.custom import CustomCall, CustomCallDelta, InputReader, text_of
from jaxserve.answers.tools.definitions import FunctionCall, FunctionCallDelta, ToolCall, ToolCallDelta
from jaxserve.request import CompletionOutput

_ORDER: dict[type[Event], int] = {Reasoning: 0, Content: 1, CallStart: 2, CallArguments: 2}
"""The order of events in one delta."""


class AnswerWriter:
    """Writes one answer: complete (`message`), or as the deltas of a stream in order (`deltas`).

    `has_calls` is true once the model has called a tool.
    """

    def __init__(
        self,
        reader: AnswerReader | None,
        call_id: Callable[[CallStart, int], str],
        *,
        counter: ReasoningCounter | None = None,
        custom: frozenset[str] = frozenset(),
        hidden_tools: Collection[str] = (),
    ):
        """Without a reader the text is the answer. `call_id` makes the id of the n-th call; without a `counter` there
        are no thoughts. The tools `custom` take a text. Calls of `hidden_tools`, which the client did not allow, are
        left out.
        """
        self._hidden_tools = hidden_tools
        self._is_hidden = False  # the latest call
        self._reader = reader
        self._counter = counter
        self._call_id = call_id
        self._custom = custom
        self._input: InputReader | None = None  # of the call of a custom tool that is open
        self._num_calls = 0
        self._order = 0  # of the latest event

    @property
    def has_calls(self) -> bool:
        """True once the model has called a tool."""
        return self._num_calls > 0

    def num_thoughts(self, output: CompletionOutput) -> int:
        """Return the number of new tokens that are thoughts."""
        return 0 if self._counter is None else self._counter.count(output.token_ids)

    def message(self, output: CompletionOutput) -> AssistantMessage:
        """Return the whole answer."""
        if self._reader is None:
            return AssistantMessage(content=output.text)
        message = message_of(self._read(output), self._call_id, custom=self._custom)
        self._num_calls = len(message.tool_calls or ())
        return message

    def deltas(self, output: CompletionOutput) -> list[Delta]:
        """Return what is new: one delta, or several where words come before thoughts or after calls, because the parts
        of a delta are told in the order thoughts, words, calls.
        """
        if self._reader is None:
            return [Delta(content=output.text or UNSET)]
        pieces: list[list[Event]] = [[]]
        for event in self._read(output):
            order = _ORDER[type(event)]
            if order < self._order:
                pieces.append([])
            self._order = order
            pieces[-1].append(event)
        is_end = output.finish_reason is not None
        return [self._delta(piece, is_last=is_end or piece is not pieces[-1]) for piece in pieces]

    def finish_reason(self, output: CompletionOutput, *, is_chosen: bool) -> ChatFinishReason | None:
        """Return why the answer has ended. With `is_chosen` the client chose the tool, so that a call is not a reason
        of its own.
        """
        if output.finish_reason == "stop" and self.has_calls and not is_chosen:
            return "tool_calls"
        return output.finish_reason

    def _read(self, output: CompletionOutput) -> list[Event]:
        assert self._reader is not None
        events = self._reader.push(output.text)
        if output.finish_reason is not None:
            events = [*events, *self._reader.finish(is_cut=output.finish_reason == "length")]
        return [event for event in events if not self._hides(event)] if self._hidden_tools else events

    def _hides(self, event: Event) -> bool:
        if isinstance(event, CallStart):
            self._is_hidden = event.name in self._hidden_tools
        return self._is_hidden and isinstance(event, CallStart | CallArguments)

    def _delta(self, events: Sequence[Event], *, is_last: bool) -> Delta:
        content = "".join(event.text for event in events if isinstance(event, Content))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning)) or UNSET
        calls: list[ToolCallDelta] = []
        for event in events:
            if isinstance(event, CallStart):
                self._end_call(calls)
                call = ToolCallDelta(index=self._num_calls, id=self._call_id(event, self._num_calls))
                if event.name in self._custom:
                    self._input = InputReader()
                    call.type, call.custom = "custom", CustomCallDelta(name=event.name, input="")
                else:
                    call.type, call.function = "function", FunctionCallDelta(name=event.name, arguments="")
                calls.append(call)
                self._num_calls += 1
            elif isinstance(event, CallArguments):
                self._argue(calls, event.text if self._input is None else self._input.push(event.text))
        if is_last:
            self._end_call(calls)
        return Delta(
            content=content or UNSET, reasoning=reasoning, reasoning_content=reasoning, tool_calls=calls or UNSET
        )

    def _argue(self, calls: list[ToolCallDelta], text: str) -> None:
        """Add to what the latest call is given."""
        if not text and self._input is not None:
            return
        if not calls or calls[-1].index != self._num_calls - 1:
            calls.append(ToolCallDelta(index=self._num_calls - 1))
        call = calls[-1]
        if self._input is None:
            call.function = call.function or FunctionCallDelta()
            call.function.arguments = (call.function.arguments or "") + text
        else:
            call.custom = call.custom or CustomCallDelta()
            call.custom.input = (call.custom.input or "") + text

    def _end_call(self, calls: list[ToolCallDelta]) -> None:
        if self._input is not None:
            self._argue(calls, self._input.finish())
            self._input = None


def message_of(
    events: Iterable[Event], call_id: Callable[[CallStart, int], str], *, custom: frozenset[str] = frozenset()
) -> AssistantMessage:
    """Return the message made of all events of an answer. `call_id` makes the id of the n-th call; the tools `custom`
    take a text.
    """
    events = joined(events)
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning)) or UNSET
    calls: list[ToolCall] = []
    for event in events:
        if isinstance(event, CallStart):
            function = FunctionCall(name=event.name, arguments="")
            calls.append(ToolCall(id=call_id(event, len(calls)), function=function))
        elif isinstance(event, CallArguments):
            calls[-1].as_function.arguments += event.text
    for call in calls:
        if (function := call.as_function).name in custom:
            call.type, call.function = "custom", UNSET
            call.custom = CustomCall(name=function.name, input=text_of(function.arguments))
    return AssistantMessage(
        content=content or (None if calls or reasoning else ""),
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=calls or UNSET,
    )
