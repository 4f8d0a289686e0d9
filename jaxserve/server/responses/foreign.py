"""Calls of hosted tools in the conversation, which other servers have answered: as calls that a chat template shows."""

from typing import Any, NamedTuple

import msgspec

from jaxserve.server.protocol.items import Item


class _Call(NamedTuple):
    """How an item of a hosted tool's call is read: the tool's name, the field with its arguments, and the fields with
    its result where the item itself has it.

    `name`: "" for an item with the name in `name`.
    """

    name: str
    arguments: str
    result: tuple[str, ...] = ()


CALLS = {
    "apply_patch_call": _Call("apply_patch", "operation"),
    "code_interpreter_call": _Call("code_interpreter", "code", ("outputs", "status")),
    "file_search_call": _Call("file_search", "queries", ("results", "status")),
    "image_generation_call": _Call("image_generation", "revised_prompt", ("status",)),
    "local_shell_call": _Call("local_shell", "action"),
    "mcp_call": _Call("", "arguments", ("output", "error", "status")),
    "shell_call": _Call("shell", "action"),
    "tool_search_call": _Call("tool_search", "arguments"),
    "web_search_call": _Call("web_search", "action", ("results", "status")),
}
"""Items that call a tool, by their types."""

OUTPUTS = {
    "apply_patch_call_output": "output",
    "local_shell_call_output": "output",
    "shell_call_output": "output",
    "tool_search_output": "tools",
}
"""Items with the result of such a call, and the fields that have it."""

NOT_READ = frozenset({"mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "additional_tools"})
"""Items that say nothing to the model."""


def call(item: Item) -> dict[str, Any]:
    """Return a call as a chat has it."""
    how = CALLS[item["type"]]
    given = {how.arguments: item[how.arguments]} if how.arguments in item else {}
    value = next(iter(given.values()), given)
    is_json = isinstance(value, str) and "arguments" in given
    arguments = value if is_json else _json(value if isinstance(value, dict) else given)
    function = {"name": how.name or str(item.get("name")), "arguments": arguments}
    return {"id": call_id(item), "type": "function", "function": function}


def own_result(item: Item) -> dict[str, Any] | None:
    """Return the message with the result that a call's item has itself, or None."""
    fields = CALLS[item["type"]].result
    if not fields:
        return None
    value = next((item[name] for name in fields if item.get(name)), "completed")
    return {"role": "tool", "tool_call_id": call_id(item), "content": _text(value)}


def output(item: Item) -> dict[str, Any]:
    """Return the message with the result of an earlier call."""
    value = item.get(OUTPUTS[item["type"]])
    if item["type"] == "tool_search_output" and isinstance(value, list):
        value = ", ".join(str(tool.get("name", tool.get("type"))) for tool in value if isinstance(tool, dict))
    return {"role": "tool", "tool_call_id": call_id(item), "content": _text(value)}


def call_id(item: Item) -> str:
    """Return the id that a call and its result have in common."""
    return str(item.get("call_id") or item.get("id") or "call")


def _text(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
