"""Write the answer of /v1/messages: the deltas of a chat become content blocks and the events that report them."""

import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from jaxserve.answers.message import ChatFinishReason
from jaxserve.answers.tools.cut_json import as_object
from jaxserve.server.anthropic.protocol import Block, MessagesResponse, MessagesUsage, OutputTokensDetails, StopReason
from jaxserve.server.protocol.chat import ChatChunkChoice
from jaxserve.server.protocol.usage import Usage

type Event = dict[str, Any]

_STOP_REASONS: dict[ChatFinishReason, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


class MessageWriter:
    """Fills `message` as deltas arrive. Each method yields its events in order and must be iterated to the end.

    At most one block is open at a time; a delta of another kind closes it.
    """

    def __init__(self, message: MessagesResponse, *, shows_thoughts: bool = True, cache_block: int | None = None):
        """`shows_thoughts`: blocks of thoughts have text. `cache_block`: as in `usage_of`."""
        self.message = message
        self._shows_thoughts = shows_thoughts
        self._cache_block = cache_block
        self._texts: list[str] = []  # texts of the open block
        self._is_open = False
        self._call_index = -1
        self._finish_reason: ChatFinishReason | None = None

    def start(self, usage: Usage) -> Iterator[Event]:
        """Begin the answer; `usage` counts the prompt."""
        self.message.usage = usage_of(usage, cache_block=self._cache_block)
        self.message.usage.output_tokens = 0
        yield {"type": "message_start", "message": msgspec.structs.replace(self.message, context_management=UNSET)}
        yield {"type": "ping"}

    def take(self, choice: ChatChunkChoice) -> Iterator[Event]:
        """Add the delta of a chat's chunk."""
        delta = choice.delta
        if delta.reasoning:
            yield from self._text("thinking", delta.reasoning if self._shows_thoughts else "")
        if delta.content:
            yield from self._text("text", delta.content)
        for call in delta.tool_calls or ():
            name, arguments = (call.function.name, call.function.arguments) if call.function else ("", "")
            if call.index != self._call_index:
                self._call_index = call.index
                call_id = call.id or f"toolu_{uuid.uuid4().hex}"
                yield from self._add({"type": "tool_use", "id": call_id, "name": name or "", "input": {}})
            if arguments:
                self._texts.append(arguments)
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})
        self._finish_reason = choice.finish_reason or self._finish_reason
        if isinstance(choice.stop_reason, str):
            self.message.stop_sequence = choice.stop_reason

    def finish(self, usage: Usage) -> Iterator[Event]:
        """Complete the answer."""
        yield from self._close()
        message = self.message
        message.stop_reason = _STOP_REASONS.get(self._finish_reason or "stop", "end_turn")
        if message.stop_reason == "end_turn" and self._call_index >= 0:  # a chat says "stop" of a call that was chosen
            message.stop_reason = "tool_use"
        if message.stop_sequence is not None:
            message.stop_reason = "stop_sequence"
        message.usage = usage_of(usage, cache_block=self._cache_block)
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        edits = {} if message.context_management is UNSET else {"context_management": message.context_management}
        yield {"type": "message_delta", "delta": delta, "usage": message.usage, **edits}
        yield {"type": "message_stop"}

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if not (self._is_open and self.message.content[-1]["type"] == kind):
            yield from self._add({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        if text:
            self._texts.append(text)
            yield self._delta({"type": f"{kind}_delta", kind: text})

    def _add(self, block: Block) -> Iterator[Event]:
        yield from self._close()
        self._is_open = True
        self._texts = []
        self.message.content.append(block)
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        block, text = self.message.content[-1], "".join(self._texts)
        if block["type"] == "tool_use":
            block["input"] = as_object(text)  # if max_tokens has cut the arguments, the complete ones
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": self._index}

    @property
    def _index(self) -> int:
        return len(self.message.content) - 1

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def usage_of(usage: Usage, *, cache_block: int | None) -> MessagesUsage:
    """Return a chat's usage in Anthropic's terms.

    `cache_block` are the tokens of a block of the prefix cache, if the client has asked for caching: the prompt's full
    blocks that were not found in it are written to it.
    """
    cached = usage.prompt_tokens_details.cached_tokens
    written = 0
    if cache_block is not None:
        written = max(0, usage.prompt_tokens // cache_block * cache_block - cached)
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - cached - written,
        output_tokens=usage.completion_tokens,
        cache_creation_input_tokens=written,
        cache_read_input_tokens=cached,
        output_tokens_details=OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
    )


def frame(event: Event) -> bytes:
    """Encode one server-sent event, with its type as its name."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))
