"""The tools of a request of /v1/messages: which of them the model is offered, and how a chat describes them.

Anthropic defines tools of its own. Those that the client runs have schemas that are known; those that Anthropic's
servers would run are left out, or refused if the request needs one.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.server.anthropic.protocol import Block, CountRequest, Message, ToolChoice, ToolDefinition
from jaxserve.server.protocol.common import not_supported
from jaxserve.server.protocol.decoding import converted

_TEXT, _LINES = {"type": "string"}, {"type": "array", "items": {"type": "integer"}}


def _commands(*names: str, **fields: dict[str, Any]) -> dict[str, Any]:
    command = {"type": "string", "enum": list(names)}
    return {"type": "object", "properties": {"command": command, **fields}, "required": ["command"]}


class _Known(NamedTuple):
    """A tool of Anthropic's that the client runs; its types begin with `prefix` and end with a date."""

    prefix: str
    description: str
    schema: dict[str, Any]


_KNOWN = (
    _Known(
        "bash_",
        "Run a command in a bash session that keeps its state. `restart` starts a new session.",
        {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}},
    ),
    _Known(
        "text_editor_",
        "View, create and edit text files. `view` shows a file (`view_range`: its first and last line) or a folder, "
        "`create` writes `file_text`, `str_replace` replaces the only `old_str` by `new_str`, `insert` adds "
        "`insert_text` after line `insert_line`.",
        _commands(
            *("view", "create", "str_replace", "insert"),
            path=_TEXT,
            file_text=_TEXT,
            old_str=_TEXT,
            new_str=_TEXT,
            insert_line={"type": "integer"},
            insert_text=_TEXT,
            view_range=_LINES,
        ),
    ),
    _Known(
        "memory_",
        "Keep notes in files under /memories, which last beyond this conversation.",
        _commands(
            *("view", "create", "str_replace", "insert", "delete", "rename"),
            path=_TEXT,
            view_range=_LINES,
            file_text=_TEXT,
            old_str=_TEXT,
            new_str=_TEXT,
            insert_line={"type": "integer"},
            insert_text=_TEXT,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
)

_SEARCH = "tool_search_tool_"
_SERVER = (
    *("web_search_", "web_fetch_", "code_execution_", "advisor_", _SEARCH, "mcp_toolset"),
    *("computer_", "browser_toolset_"),  # the client runs them, but they answer with pictures
)
"""Beginnings of the types of tools that cannot be offered."""


class Offer(NamedTuple):
    """The tools that a request offers, with the fields that have them, and the types of those that are left out."""

    tools: list[tuple[str, ToolDefinition]]
    left_out: list[str]


def offer(body: CountRequest) -> Offer:
    """Return the tools of a request. Raises InvalidRequest, naming the field, for an unknown type of tool, and if the
    request has no other tools than those that cannot be offered, or demands one.
    """
    given = [(f"tools[{index}]", tool) for index, tool in enumerate(body.tools or ())]
    given += list(_added(body.messages))
    kept = [(param, tool) for param, tool in given if _is_client_tool(tool, param)]
    left_out = [tool for _, tool in given if not any(tool is each for _, each in kept)]
    choice = body.tool_choice
    for param, tool in given:
        is_demanded = choice is not None and choice.type == "tool" and choice.name == tool.name
        if (not kept or is_demanded) and any(tool is each for each in left_out):
            raise not_supported(f"{param}.type", f"a tool of type {str(tool.type)[:40]!r}, which the server would run,")
    removed = set(_changes(body.messages, "tool_removal"))
    kept = [(param, tool) for param, tool in kept if tool.name not in removed]
    searches = any((tool.type or "").startswith(_SEARCH) for tool in left_out)
    loaded = [each for each in kept if not each[1].defer_loading]
    if loaded and not searches:  # something can find the others
        wanted = {*_named(body.messages), choice.name if choice is not None else None}
        kept = [(param, tool) for param, tool in kept if not tool.defer_loading or tool.name in wanted]
    return Offer(kept, [str(tool.type) for tool in left_out])


def chat_tool(tool: ToolDefinition, param: str) -> dict[str, Any]:
    """Return a tool as a chat describes it. Raises InvalidRequest if it has no name."""
    if tool.name is None:
        raise InvalidRequest(f"{param}.name: this field is required", param=f"{param}.name")
    known = next((known for known in _KNOWN if (tool.type or "").startswith(known.prefix)), None)
    description = tool.description if known is None else known.description
    if tool.input_examples:
        examples = "\n".join(msgspec.json.encode(example).decode() for example in tool.input_examples)
        description = f"{description or ''}\n\nExamples of its input:\n{examples}".strip()
    function = {
        "name": tool.name,
        "description": description,
        "parameters": tool.input_schema if known is None else known.schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def chat_tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    """Return a choice as a chat has it. Raises InvalidRequest."""
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("tool_choice.name is missing", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _is_client_tool(tool: ToolDefinition, param: str) -> bool:
    kind = tool.type or "custom"
    if kind == "custom" or any(kind.startswith(known.prefix) for known in _KNOWN):
        return tool.allowed_callers is None or "direct" in tool.allowed_callers
    if not kind.startswith(_SERVER):
        raise not_supported(f"{param}.type", f"a tool of type {kind[:40]!r}")
    return False


def _changes(messages: Sequence[Message], kind: str) -> Iterator[str]:
    """Yield the names of tools that system messages add or remove."""
    for index, message in enumerate(messages):
        for position, block in enumerate(_blocks(message)):
            if block.get("type") == kind and message.role == "system":
                tool, param = block.get("tool"), f"messages[{index}].content[{position}].tool"
                if not isinstance(tool, dict):
                    raise InvalidRequest(f"{param} must be an object", param=param)
                if tool.get("type") == "tool_reference":
                    yield str(tool.get("name"))
                elif tool.get("type") != "tool_definition":
                    raise not_supported(f"{param}.type", f"a tool of type {str(tool.get('type'))[:40]!r}")


def _added(messages: Sequence[Message]) -> Iterator[tuple[str, ToolDefinition]]:
    """Yield the tools that system messages define."""
    for index, message in enumerate(messages):
        for position, block in enumerate(_blocks(message)):
            tool = block.get("tool") if block.get("type") == "tool_addition" else None
            if isinstance(tool, dict) and tool.get("type") == "tool_definition":
                param = f"messages[{index}].content[{position}].tool.definition"
                yield param, converted(tool.get("definition"), ToolDefinition, param)


def _named(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the names of deferred tools that the conversation has loaded, or called."""
    yield from _changes(messages, "tool_addition")
    for message in messages:
        for block in _blocks(message):
            if block.get("type") == "tool_use":
                yield str(block.get("name"))
            content = block.get("content")
            references = content.get("tool_references") if isinstance(content, dict) else content
            for each in references if isinstance(references, list) else ():
                if isinstance(each, dict) and each.get("type") == "tool_reference":
                    yield str(each.get("tool_name"))


def _blocks(message: Message) -> list[Block]:
    return message.content if isinstance(message.content, list) else []
