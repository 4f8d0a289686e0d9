"""The tools of /v1/responses as a chat offers them: tools in namespaces under one flat name each, and no hosted tools.

A tool of a namespace is offered under the namespace's name and its own; in answers it has both again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.decoding import converted
from jaxserve.errors import InvalidRequest
from jaxserve.server.protocol.common import not_supported
from jaxserve.server.protocol.items import Item, ToolsItem
from jaxserve.server.protocol.responses import (
    CustomTool,
    FunctionTool,
    NamespaceTool,
    ResponsesRequest,
    ToolChoiceFunction,
)

HOSTED = frozenset(
    {
        *("apply_patch", "code_interpreter", "computer", "file_search", "image_generation", "local_shell", "mcp"),
        *("programmatic_tool_calling", "shell", "tool_search", "web_search"),
    }
)
"""Types of tools that OpenAI's servers run, or whose calls have shapes of their own."""
_HOSTED_BEGINNINGS = ("web_search_", "computer_")  # with a version, a date
TOOL_ITEMS = ("tool_search_output", "additional_tools")
"""Types of items with further tools."""


class Offered(NamedTuple):
    """One tool that is offered: as a chat has it, the field that it was in, and its name and namespace there."""

    chat: dict[str, Any]
    param: str
    name: str
    namespace: str | None

    @property
    def flat_name(self) -> str:
        """The name under which the model is offered the tool."""
        return self.chat[self.chat["type"]]["name"]


class Tools(NamedTuple):
    """The tools of a request, and the types of those that are left out."""

    offered: list[Offered]
    left_out: list[str]

    @property
    def by_name(self) -> dict[str, Offered]:
        """The tools by the names under which they are offered."""
        return {tool.flat_name: tool for tool in self.offered}


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name under which a tool is offered."""
    if not namespace:
        return name
    return f"{namespace}{'' if namespace.endswith('_') else '__'}{name}"


def tools_of(body: ResponsesRequest, items: Sequence[Item] = (), *, num_before: int = 0) -> Tools:
    """Return the tools of a request, of its instructions' items, and of its conversation's items. Raises
    InvalidRequest, naming the field.

    The first `num_before` items are of earlier turns.
    """
    tools = Tools([], [])
    for index, tool in enumerate(body.tools or ()):
        _add(tool, f"tools[{index}]", tools)
    known = set(tools.by_name)
    instructions = body.instructions if isinstance(body.instructions, list) else []
    sources = [(f"instructions[{index}]", item) for index, item in enumerate(instructions)]
    sources += [(f"input[{index - num_before}]", item) for index, item in enumerate(items)]
    for param, item in sources:
        if item.get("type") in TOOL_ITEMS:
            found = Tools([], [])
            for position, tool in enumerate(converted(item, ToolsItem, param).tools):
                _add(tool, f"{param}.tools[{position}]", found)
            tools.offered.extend(tool for name, tool in found.by_name.items() if name not in known)
            known |= set(found.by_name)
    return tools


def _add(tool: Mapping[str, Any], param: str, tools: Tools, *, space: NamespaceTool | None = None) -> None:
    kind = tool.get("type")
    if kind in ("function", "custom"):
        tools.offered.append(_offered(tool, param, space))
    elif kind == "namespace" and space is None:
        namespace = converted(tool, NamespaceTool, param)
        for index, each in enumerate(namespace.tools):
            _add(each, f"{param}.tools[{index}]", tools, space=namespace)
    elif isinstance(kind, str) and _is_hosted(kind):
        tools.left_out.append(kind)
    elif isinstance(kind, str):
        raise not_supported(f"{param}.type", f"a tool of type {kind[:40]!r}")
    else:
        raise InvalidRequest(f"{param}.type must be a text", param=f"{param}.type")


def _offered(tool: Mapping[str, Any], param: str, space: NamespaceTool | None) -> Offered:
    """Return a function or custom tool as a chat has it."""
    given = converted(tool, FunctionTool if tool["type"] == "function" else CustomTool, param)
    namespace = None if space is None else space.name
    about = (None if space is None else space.description, given.description)
    chat: dict[str, Any] = {
        "name": flat_name(namespace, given.name),
        "description": "\n\n".join(text for text in about if text) or None,
    }
    if isinstance(given, FunctionTool):
        chat |= {"parameters": given.parameters, "strict": given.strict}
    elif given.format is not None and given.format.type == "grammar":
        grammar = {"definition": given.format.definition, "syntax": given.format.syntax}
        for name, value in grammar.items():
            if value is None:
                raise InvalidRequest(f"{param}.format.{name}: this field is required", param=f"{param}.format.{name}")
        chat["format"] = {"type": "grammar", "grammar": grammar}
    kind = given.type
    inner = {name: value for name, value in chat.items() if value is not None}
    return Offered({"type": kind, kind: inner}, param, given.name, namespace)


def chat_tool_choice(choice: ToolChoiceFunction, tools: Tools) -> dict[str, Any]:
    """Return a choice as a chat has it. Raises InvalidRequest if it demands a tool that is not offered."""
    if choice.type == "allowed_tools":
        tools_given = enumerate(choice.tools or ())
        given = [converted(tool, ToolChoiceFunction, f"tool_choice.tools[{index}]") for index, tool in tools_given]
        names = [_named(each, tools) for each in given if not _is_hosted(each.type)]
        if given and not names:
            raise not_supported("tool_choice", f"a choice of {given[0].type[:40]!r}, which this server does not run,")
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode or "auto", "tools": names}}
    if _is_hosted(choice.type):
        raise not_supported("tool_choice", f"a choice of {choice.type[:40]!r}, which this server does not run,")
    return _named(choice, tools)


def _is_hosted(kind: str) -> bool:
    return kind in HOSTED or kind.startswith(_HOSTED_BEGINNINGS)


def _named(choice: ToolChoiceFunction, tools: Tools) -> dict[str, Any]:
    """Return the tool that a choice names. In a namespace its own name is enough if no other tool has it."""
    if choice.type not in ("function", "custom"):
        raise not_supported("tool_choice", f"a choice of type {choice.type[:40]!r}")
    if choice.name is None:
        raise InvalidRequest("tool_choice.name: this field is required", param="tool_choice.name")
    name, by_name = flat_name(choice.namespace, choice.name), tools.by_name
    same = [tool.flat_name for tool in tools.offered if tool.name == choice.name]
    if name not in by_name and choice.namespace is None and len(same) == 1:
        name = same[0]
    kind = by_name[name].chat["type"] if name in by_name else choice.type
    return {"type": kind, kind: {"name": name}}
