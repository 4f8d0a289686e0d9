"""Convert a request of /v1/responses to the equivalent chat: items become messages, and other fields are renamed."""

import re
from collections.abc import Sequence
from typing import Any

from jaxserve.decoding import converted
from jaxserve.errors import InvalidRequest
from jaxserve.server.protocol import fields
from jaxserve.server.protocol.chat import ChatRequest
from jaxserve.server.protocol.common import not_supported, rename
from jaxserve.server.protocol.items import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    Item,
    MessageItem,
    Part,
    ThoughtsItem,
)
from jaxserve.server.protocol.messages import Turn, join_parts
from jaxserve.server.protocol.responses import ResponsesRequest, TextFormat, ToolChoiceFunction
from jaxserve.server.responses import foreign
from jaxserve.server.responses.tools import Tools, chat_tool_choice, flat_name

_CONVERTED = frozenset({"stream", "stream_options", "tools", "tool_choice", "top_logprobs", "metadata", "store"})
"""Fields that chats also follow, but that are converted or omitted."""

_SAME_IN_CHAT = tuple(sorted((fields.followed("responses") & fields.followed("chat")) - _CONVERTED))
"""Fields that are passed to the chat unchanged."""

# The chat's name of a field -> its name here, for errors.
_NAMES = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "tool_choice.function": "tool_choice",
    "tool_choice.custom": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
}


_TEXTS = ("input_text", "output_text", "reasoning_text", "text", "refusal")


def input_items(given: str | list[Item]) -> list[Item]:
    """Return `input` as a list of items. Null means absent. Raises InvalidRequest for a type that is no text."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    for index, item in enumerate(given):
        if not isinstance(item.get("type"), str | None):
            raise InvalidRequest(f"input[{index}].type must be a text", param=f"input[{index}].type")
    return [{name: value for name, value in item.items() if value is not None} for item in given]


def is_reference(item: Item) -> bool:
    """Return true if an item only refers to one of a stored answer. An item with nothing but an id does, too."""
    return item.get("type") == "item_reference" or item.keys() == {"id"}


def listed(item: Item, index: int) -> Item:
    """Return an item as it appears in lists of items: with an id and a status, and its text in parts."""
    item = {"id": f"item_{index}", "type": "message", "status": "completed", **item}
    if item["type"] == "message" and isinstance(item["content"], str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        extra = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
        item["content"] = [{"type": kind, "text": item["content"], **extra}]
    return item


def as_messages(items: Sequence[Item], *, num_before: int = 0) -> list[dict[str, Any]]:
    """Convert items to chat messages. Thoughts, text and calls of one turn of the assistant become one message, as in a
    chat.

    The first `num_before` items are of earlier turns: indices in errors count from there. Raises InvalidRequest, naming
    the item.
    """
    messages: list[dict[str, Any]] = []
    turn = Turn()
    for index, item in enumerate(items):
        param = f"input[{index - num_before}]"
        kind = item.get("type", "message")
        if kind == "message":
            message = converted(item, MessageItem, param)
            text = _text(message.content, f"{param}.content")
            if message.role == "assistant":
                if turn.is_only_words:
                    messages += turn.close()
                turn.words.append(text)
            else:
                messages += [*turn.close(), {"role": message.role, "content": text}]
        elif kind == "function_call":
            call = converted(item, CallItem, param)
            function = {"name": flat_name(call.namespace, call.name), "arguments": call.arguments}
            turn.calls.append({"id": call.call_id, "type": "function", "function": function})
        elif kind == "custom_tool_call":
            call = converted(item, CustomCallItem, param)
            custom = {"name": flat_name(call.namespace, call.name), "input": call.input}
            turn.calls.append({"id": call.call_id, "type": "custom", "custom": custom})
        elif kind in foreign.CALLS:
            turn.calls.append(foreign.call(item))
            if (result := foreign.own_result(item)) is not None:
                messages += [*turn.close(), result]
        elif kind in foreign.OUTPUTS:
            messages += [*turn.close(), foreign.output(item)]
        elif kind in foreign.NOT_READ:
            pass
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = converted(item, CallOutputItem, param)
            text = _text(output.output, f"{param}.output")
            messages += [*turn.close(), {"role": "tool", "tool_call_id": output.call_id, "content": text}]
        elif kind == "reasoning":
            turn.thoughts.append(_text(converted(item, ThoughtsItem, param).content or "", f"{param}.content"))
        else:
            raise not_supported(f"{param}.type", f"an item of type {str(kind)[:40]!r}")
    return messages + turn.close()


def chat_request(body: ResponsesRequest, messages: list[dict[str, Any]], tools: Tools) -> ChatRequest:
    """Return the chat of a request, which offers `tools`. Raises InvalidRequest."""
    chat: dict[str, Any] = {name: getattr(body, name) for name in _SAME_IN_CHAT}
    chat["messages"] = [*_instructions(body.instructions), *messages]
    chat["max_tokens"], chat["max_completion_tokens"] = body.token_limit, None
    if body.wants_logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _response_format(body.text.format)
    if body.text is not None:
        chat["verbosity"] = body.text.verbosity
    if tools.offered:
        chat["tools"] = [tool.chat for tool in tools.offered]
    choice = body.tool_choice
    chat["tool_choice"] = chat_tool_choice(choice, tools) if isinstance(choice, ToolChoiceFunction) else choice
    return converted({name: value for name, value in chat.items() if value is not None}, ChatRequest)


def _instructions(given: str | list[Item] | None) -> list[dict[str, Any]]:
    """Return the messages that precede all others, which the next turn does not inherit."""
    if isinstance(given, list):
        try:
            return as_messages(input_items(given))
        except InvalidRequest as error:
            rename(error, "input", "instructions")
            raise
    return [] if given is None else [{"role": "system", "content": given}]


def name_as_sent(error: InvalidRequest, body: ResponsesRequest, tools: Tools) -> None:
    """Rename the field in an error of the chat to its name here, also where its message begins with it."""
    limit = body.token_limit_field
    for old, new in (*_NAMES.items(), ("max_tokens", limit), ("max_completion_tokens", limit)):
        rename(error, old, new)
    if error.param is not None and (found := re.match(r"tools\[(\d+)\](\.function|\.custom)", error.param)):
        rename(error, found[0], tools.offered[int(found[1])].param)
    elif error.param is not None and error.param.startswith("messages"):
        rename(error, error.param, "input")  # the index of a message is not that of an item


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type == "json_schema" and wanted.schema is None:
        raise InvalidRequest("text.format.schema is required", param="text.format.schema")
    given = {} if wanted.schema is None else {"schema": wanted.schema, "strict": wanted.strict}
    return {"type": wanted.type} | given


def _text(content: str | list[Part], param: str) -> str:
    return content if isinstance(content, str) else join_parts(content, param, _TEXTS)
