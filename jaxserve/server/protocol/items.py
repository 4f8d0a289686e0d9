"""The items of a conversation of /v1/responses, as clients send them. They are stored unchanged, as dicts."""

from typing import Annotated, Any

import msgspec

from jaxserve.server.protocol.names import STRUCTS


class ItemBase(msgspec.Struct, kw_only=True):
    """Fields of any item. `id` and `status`, which an answer's items have, are accepted and ignored."""

    type: str | None = None
    id: Any = None
    status: Any = None


class Part(msgspec.Struct, kw_only=True):
    """One part of a text."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None


class MessageItem(ItemBase, kw_only=True):
    """A message of any role."""

    role: str
    content: str | list[Part]
    phase: Any = None


class CallItem(ItemBase, kw_only=True):
    """A call of a function, which may be in a namespace."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    caller: Any = None


class CustomCallItem(ItemBase, kw_only=True):
    """A call of a custom tool."""

    call_id: str
    name: str
    input: str
    namespace: str | None = None
    caller: Any = None


class ThoughtsItem(ItemBase, kw_only=True):
    """The model's thoughts. The summary is ignored: this server writes none."""

    content: str | list[Part] | None = None
    summary: Any = None
    encrypted_content: Any = None


class CallOutputItem(ItemBase, kw_only=True):
    """The result of a call."""

    call_id: str
    output: str | list[Part]
    name: Any = None
    caller: Any = None


class ToolsItem(ItemBase, kw_only=True):
    """Further tools: what a search of tools has found, or what was added in the midst of a conversation."""

    call_id: str | None = None
    tools: list[dict[str, Any]]
    execution: Any = None
    role: Any = None


class ShellOutput(msgspec.Struct, kw_only=True):
    """What a command of a hosted shell has written."""

    stdout: Any = None
    stderr: Any = None
    outcome: Any = None
    created_by: Any = None


HostedItem = msgspec.defstruct(
    "HostedItem",
    [
        *(
            (name, Any, None)
            for name in (
                *("action", "approval_request_id", "approve", "arguments", "background", "code", "container_id"),
                *("created_by", "environment", "error", "max_output_length", "operation", "outputs", "output_format"),
                *("queries", "quality", "reason", "result", "results", "revised_prompt", "server_label", "size"),
            )
        ),
        ("output", list[ShellOutput], []),
    ],
)
"""Fields of the items of hosted tools (`responses.foreign`)."""

Item = dict[str, Any]

ITEM_STRUCTS = (MessageItem, CallItem, CustomCallItem, ThoughtsItem, CallOutputItem, ToolsItem, HostedItem)
InputItem = Annotated[Item, msgspec.Meta(extra={STRUCTS: ITEM_STRUCTS})]
"""One item of an input, of any type."""
