"""Tools that a chat offers, and calls of them: in requests, in the conversation, and in answers."""

import re
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.errors import InvalidRequest
from jaxserve.server.syntaxes.tool import Tool

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
NO_PARAMETERS = {"type": "object", "properties": {}}


class Function(msgspec.Struct, kw_only=True):
    """A function; `parameters` is a JSON schema.

    The schema is enforced where a call is forced, and if `strict` in any call, as far as the model's syntax allows
    (`Forcing.follows_strict`).
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, kw_only=True):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: Function


class FunctionName(msgspec.Struct):
    """The name of a function."""

    name: str


class AllowedFunction(msgspec.Struct, kw_only=True):
    """One of the functions that may be called."""

    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(msgspec.Struct, kw_only=True):
    """Some of the tools that are offered: no others may be called. With the mode "required" one of them must be."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[AllowedFunction]


class ToolChoice(msgspec.Struct, kw_only=True):
    """The function that must be called, or those that may be."""

    type: Literal["function", "allowed_tools"] = "function"
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    @property
    def names(self) -> list[str]:
        """Names of the functions that may be called."""
        if self.allowed_tools is not None:
            return [tool.function.name for tool in self.allowed_tools.tools]
        return [] if self.function is None else [self.function.name]


def must_call(choice: str | ToolChoice | None) -> bool:
    """Return true if the answer has to be a call."""
    if isinstance(choice, ToolChoice) and choice.allowed_tools is not None:
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, ToolChoice)


def is_chosen(choice: str | ToolChoice | None) -> bool:
    """Return true if the client has named the one function to be called."""
    return isinstance(choice, ToolChoice) and choice.function is not None


class FunctionCall(msgspec.Struct, kw_only=True):
    """The function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the model has made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionCallDelta(msgspec.Struct, kw_only=True):
    """The new part of a call: first the name, then pieces of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """The new part of call `index` of an answer. Its first piece has its id and name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta


def check_tools(tools: list[ToolDefinition] | None, choice: str | ToolChoice | None) -> None:
    """Raise InvalidRequest, naming the field, for invalid tools or an invalid choice."""
    tools = tools or []
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} entries, at most {MAX_TOOLS} are allowed", param="tools")
    names = set()
    for index, tool in enumerate(tools):
        param = f"tools[{index}].function.name"
        name = tool.function.name
        if _NAME.fullmatch(name) is None:
            raise InvalidRequest(f"{param} must have 1 to 64 letters, digits, dots, _ or -", param=param)
        if name in names:
            raise InvalidRequest(f"{param}: there are two tools of the name {name!r}", param=param)
        names.add(name)
    if isinstance(choice, ToolChoice):
        for name, value in (("function", choice.function), ("allowed_tools", choice.allowed_tools)):
            if (value is None) == (choice.type == name):
                what = "is required" if value is None else f"contradicts its type {choice.type!r}"
                raise InvalidRequest(f"tool_choice.{name} {what}", param=f"tool_choice.{name}")
        if not choice.names:
            param = "tool_choice.allowed_tools.tools"
            raise InvalidRequest(f"{param} must not be empty", param=param)
        for name in choice.names:
            if name not in names:
                raise InvalidRequest(f"tool_choice names {name[:64]!r}, which is not in tools", param="tool_choice")
    elif choice == "required" and not tools:
        raise InvalidRequest("tool_choice 'required' needs tools", param="tool_choice")


def template_tools(tools: list[ToolDefinition]) -> list[dict[str, Any]]:
    """Convert tools for a chat template; many templates fail if a description or the parameters are missing."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                "description": tool.function.description or "",
                "parameters": NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters,
            },
        }
        for tool in tools
    ]


def callable_tools(tools: list[ToolDefinition], choice: str | ToolChoice | None) -> list[Tool]:
    """Return the tools that the model may call."""
    if choice == "none":
        return []
    offered = offered_tools(tools)
    return [tool for tool in offered if tool.name in choice.names] if isinstance(choice, ToolChoice) else offered


def offered_tools(tools: list[ToolDefinition]) -> list[Tool]:
    """Return all tools of a request, those that may not be called, too: a call of these is hidden."""
    return [
        Tool(
            tool.function.name,
            NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters,
            is_strict=bool(tool.function.strict),
        )
        for tool in tools
    ]
