"""Write the answer of /v1/responses: the deltas of a chat become output items and the events that report them."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET

from jaxserve.answers.message import ChatFinishReason
from jaxserve.server.protocol.chat import TokenLogprob
from jaxserve.server.protocol.responses import (
    CustomToolCall,
    FunctionCall,
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseBody,
    ResponseError,
    ResponseUsage,
)
from jaxserve.server.protocol.usage import Usage
from jaxserve.server.wire.body import EncodedList, encoded

type Event = dict[str, Any]

_GIVEN: dict[Any, str] = {FunctionCall: "function_call_arguments", CustomToolCall: "custom_tool_call_input"}
"""What calls are given, in the names of events."""


class ResponseWriter:
    """Fills `response` as deltas arrive. Each method yields its events in order and must be iterated to the end.

    At most one output item is open at a time; a delta of another kind closes it. Log probabilities are encoded as they
    arrive, once for all events that close an item and the response, which contain them four times.
    """

    def __init__(self, response: ResponseBody, *, names: Mapping[str, tuple[str, str | None]] | None = None):
        """`names` are the names and namespaces that tools have for the client, by the names that the model writes."""
        self.response = response
        self._names = names or {}
        self._num_events = 0
        self._open: OutputItem | None = None
        self._text: list[str] = []  # of the open item
        self._logprobs = EncodedList()
        self._call_index = -1

    @property
    def is_speaking(self) -> bool:
        """True if the open item is a message."""
        return isinstance(self._open, OutputMessage)

    def start(self) -> Iterator[Event]:
        """Begin the answer."""
        yield self._of_response("response.created")
        self.response.status = "in_progress"
        yield self._of_response("response.in_progress")

    def text(self, text: str, logprobs: Sequence[TokenLogprob], *, item_id: str | None = None) -> Iterator[Event]:
        """Add text of the model's message."""
        if not self.is_speaking:
            yield from self._close("completed")
            item = OutputMessage(id=item_id or _new_id("msg"), status="in_progress", content=[])
            yield from self._add(item)
            self._logprobs = EncodedList()
            item.content.append(OutputText(text="", logprobs=cast(Any, self._logprobs)))
            yield self._part_event("response.content_part.added", {"part": item.content[0]})
        self._text.append(text)
        self._logprobs.extend(logprobs)
        yield self._part_event("response.output_text.delta", {"delta": text, "logprobs": list(logprobs)})

    def reasoning(self, text: str, *, item_id: str | None = None) -> Iterator[Event]:
        """Add text of the model's thoughts."""
        if not isinstance(self._open, ReasoningItem):
            yield from self._close("completed")
            item = ReasoningItem(id=item_id or _new_id("rs"), status="in_progress", content=[])
            yield from self._add(item)
            item.content.append(ReasoningText(text=""))
            yield self._part_event("response.content_part.added", {"part": item.content[0]})
        self._text.append(text)
        yield self._part_event("response.reasoning_text.delta", {"delta": text})

    def call(
        self,
        index: int,
        *,
        call_id: str | None,
        name: str | None,
        given: str,
        is_custom: bool = False,
        item: FunctionCall | CustomToolCall | None = None,
    ) -> Iterator[Event]:
        """Add to the model's call number `index` what the tool is `given`: arguments, or the text of a custom tool.

        The first delta of a call has its id and name; with `item`, it is the call of this complete item.
        """
        if not isinstance(self._open, FunctionCall | CustomToolCall) or index != self._call_index:
            yield from self._close("completed")
            self._call_index = index
            own_name, namespace = self._names.get(name or "", (name or "", None))
            new = CustomToolCall if is_custom else FunctionCall
            yield from self._add(
                new(
                    **{"input" if is_custom else "arguments": ""},
                    id=item.id if item is not None else _new_id("ctc" if is_custom else "fc"),
                    status="in_progress",
                    call_id=call_id or _new_id("call"),
                    name=own_name,
                    namespace=item.namespace if item is not None else namespace or UNSET,
                )
            )
        if given:
            self._text.append(given)
            yield self._item_event(f"response.{_GIVEN[type(self._open)]}.delta", {"delta": given})

    def item(self, item: OutputItem) -> Iterator[Event]:
        """Write an item that is complete, with its own id."""
        index = len(self.response.output)
        match item:
            case OutputMessage(content=content):
                for part in content:
                    yield from self.text(part.text, part.logprobs, item_id=item.id)
            case ReasoningItem(content=content):
                for thought in content:
                    yield from self.reasoning(thought.text, item_id=item.id)
            case FunctionCall(arguments=given) | CustomToolCall(input=given):
                yield from self.call(
                    index,
                    call_id=item.call_id,
                    name=item.name,
                    given=given,
                    is_custom=isinstance(item, CustomToolCall),
                    item=item,
                )
        yield from self._close("completed" if item.status == "completed" else "incomplete")

    def finish(self, reason: ChatFinishReason | None, usage: Usage) -> Iterator[Event]:
        """Complete the answer."""
        is_complete = reason != "length"
        yield from self._close("completed" if is_complete else "incomplete")
        self.response.status = "completed" if is_complete else "incomplete"
        if not is_complete:
            self.response.incomplete_details = IncompleteDetails("max_output_tokens")
        self.response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
            total_tokens=usage.total_tokens,
        )

    def fail(self, error: ResponseError) -> Iterator[Event]:
        """Mark the answer as failed."""
        yield from self._close("incomplete")
        self.response.status = "failed"
        self.response.error = error

    def end(self) -> Event:
        """Return the last event, which reports how the answer ended."""
        return self._of_response(f"response.{self.response.status}")

    def cancel(self) -> Iterator[Event]:
        """Mark the answer as cancelled."""
        yield from self._close("incomplete")
        self.response.status = "cancelled"

    def _add(self, item: OutputItem) -> Iterator[Event]:
        self._open = item
        self._text = []
        self.response.output.append(item)
        yield self._event("response.output_item.added", {"output_index": self._output_index, "item": item})

    def _close(self, status: Literal["completed", "incomplete"]) -> Iterator[Event]:
        item, self._open = self._open, None  # first, so that nothing is closed twice if iteration stops half-way
        if item is None:
            return
        text = "".join(self._text)
        item.status = status
        match item:  # an item that was only just opened has no part to report
            case OutputMessage(content=[part]):
                part.text = text
                yield self._part_event("response.output_text.done", {"text": text, "logprobs": part.logprobs})
                yield self._part_event("response.content_part.done", {"part": part})
            case ReasoningItem(content=[thought]):
                thought.text = text
                yield self._part_event("response.reasoning_text.done", {"text": text})
                yield self._part_event("response.content_part.done", {"part": thought})
            case FunctionCall():
                item.arguments = text
                yield self._item_event("response.function_call_arguments.done", {"name": item.name, "arguments": text})
            case CustomToolCall():
                item.input = text
                yield self._item_event("response.custom_tool_call_input.done", {"input": text})
            case _:
                pass
        yield self._event("response.output_item.done", {"output_index": self._output_index, "item": item})

    @property
    def _output_index(self) -> int:
        return len(self.response.output) - 1

    def _of_response(self, kind: str) -> Event:
        return self._event(kind, {"response": self.response})

    def _part_event(self, kind: str, fields: Event) -> Event:
        return self._item_event(kind, {"content_index": 0} | fields)

    def _item_event(self, kind: str, fields: Event) -> Event:
        return self._event(kind, {"item_id": self.response.output[-1].id, "output_index": self._output_index} | fields)

    def _event(self, kind: str, fields: Event) -> Event:
        """Return an event as plain data. It must be encoded before the next one is made, since its structs change."""
        event = {"type": kind, "sequence_number": self._num_events} | fields
        self._num_events += 1
        return event


def replay(response: ResponseBody) -> Iterator[Event]:
    """Yield the events of a complete response, each text in one piece."""
    begun = msgspec.structs.replace(
        response, status="in_progress", output=[], error=None, incomplete_details=None, usage=UNSET
    )
    writer = ResponseWriter(begun)
    yield from writer.start()
    for item in response.output:
        yield from writer.item(item)
    writer.response = response
    yield writer.end()


def last_event(response: ResponseBody, number: int) -> Event:
    """Return the event that ends a complete response, with this sequence number."""
    return {"type": f"response.{response.status}", "sequence_number": number, "response": response}


_LAST = tuple(f"event: response.{status}\n".encode() for status in ("completed", "incomplete", "failed", "cancelled"))


def is_last(frame: bytes) -> bool:
    """Return true for the server-sent event that ends a response."""
    return frame.startswith(_LAST)


def frame(event: Event) -> bytes:
    """Encode one server-sent event, with its type as its name."""
    return b"".join([b"event: %b\ndata: " % event["type"].encode(), *encoded(event), b"\n\n"])


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
