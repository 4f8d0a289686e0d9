"""The tools of a request of /v1/messages: which of them the model is offered, and how a chat describes them.

Anthropic defines tools of its own. Those that the client runs have schemas that are known; those that Anthropic's
servers would run are left out, or refused if the request needs one.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from jaxserve.decoding import converted
from jaxserve.errors import InvalidRequest
from jaxserve.server.anthropic.protocol import CountRequest, Message, ToolChoice, ToolDefinition
from jaxserve.server.protocol.common import not_supported

_TEXT = {"type": "string"}
_OF_FILES = {
    **dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text"), _TEXT),
    "insert_line": {"type": "integer"},
    "view_range": {"type": "array", "items": {"type": "integer"}},
}


def _files(*further: str, **fields: dict[str, Any]) -> dict[str, Any]:
    command = {"type": "string", "enum": ["view", "create", "str_replace", "insert", *further]}
    return {"type": "object", "properties": {"command": command, **_OF_FILES, **fields}, "required": ["command"]}


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
        _files(),
    ),
    _Known(
        "memory_",
        "Keep notes in files under /memories, which last beyond this conversation.",
        _files("delete", "rename", old_path=_TEXT, new_path=_TEXT),
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
    changes = list(_changes(body.messages))
    defined = {change.name: change.definition for change in changes if change.definition is not None}
    is_added = {change.name: change.is_added for change in changes}  # the last change counts
    given = [(f"tools[{index}]", tool) for index, tool in enumerate(body.tools or ()) if tool.name not in defined]
    given += defined.values()
    is_client = [_is_client_tool(tool, param) for param, tool in given]
    choice = body.tool_choice
    for (param, tool), runs in zip(given, is_client, strict=True):
        is_demanded = choice is not None and choice.type == "tool" and choice.name == tool.name
        if not runs and (is_demanded or not any(is_client)):
            raise not_supported(f"{param}.type", f"a tool of type {str(tool.type)[:40]!r}, which the server would run,")
    left_out = [tool.type or "custom" for (_, tool), runs in zip(given, is_client, strict=True) if not runs]
    kept = [
        each for each, runs in zip(given, is_client, strict=True) if runs and is_added.get(each[1].name or "", True)
    ]
    searches = any(kind.startswith(_SEARCH) for kind in left_out)
    if not searches and any(not tool.defer_loading for _, tool in kept):  # something can find the others
        wanted = {*is_added, *_named(body.messages), choice.name if choice is not None else None}
        kept = [(param, tool) for param, tool in kept if not tool.defer_loading or tool.name in wanted]
    return Offer(kept, left_out)


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


class _Change(NamedTuple):
    """A tool that a system message adds or removes, with the definition and its field where it is new."""

    name: str
    is_added: bool
    definition: tuple[str, ToolDefinition] | None = None


def _changes(messages: Sequence[Message]) -> Iterator[_Change]:
    for index, message in enumerate(messages):
        for position, block in enumerate(message.blocks):
            if block.get("type") not in ("tool_addition", "tool_removal") or message.role != "system":
                continue
            is_added = block["type"] == "tool_addition"
            tool, param = block.get("tool"), f"messages[{index}].content[{position}].tool"
            kind = tool.get("type") if isinstance(tool, dict) else None
            if isinstance(tool, dict) and kind == "tool_reference":
                yield _Change(str(tool.get("name")), is_added)
            elif isinstance(tool, dict) and kind == "tool_definition" and is_added:
                definition = converted(tool.get("definition"), ToolDefinition, f"{param}.definition")
                yield _Change(definition.name or "", is_added, (f"{param}.definition", definition))
            else:
                raise not_supported(f"{param}.type", f"a tool of type {str(kind)[:40]!r}")


def _named(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the names of deferred tools that results have loaded, or that were called."""
    for message in messages:
        for block in message.blocks:
            if block.get("type") == "tool_use":
                yield str(block.get("name"))
            content = block.get("content")
            references = content.get("tool_references") if isinstance(content, dict) else content
            for each in references if isinstance(references, list) else ():
                if isinstance(each, dict) and each.get("type") == "tool_reference":
                    yield str(each.get("tool_name"))
