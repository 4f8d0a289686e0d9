"""Tools that a chat offers, and calls of them: in requests, in the conversation, and in answers.

A custom tool takes a text. To the model it is a function of one argument, `input`; only clients see the difference.
"""

import re
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.answers.tools.custom import Custom, CustomCall, CustomCallDelta, input_schema
from jaxserve.answers.tools.tool import Tool
from jaxserve.errors import InvalidRequest

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
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


ToolType = Literal["function", "custom"]


def _require(name: ToolType, value: object) -> None:
    """Raise the error of msgspec for a missing field: a tool has the field that its type names."""
    if value is None or value is UNSET:
        raise ValueError(f"Object missing required field `{name}`")


class ToolDefinition(msgspec.Struct, kw_only=True):
    """A tool that the model may call."""

    type: ToolType = "function"
    function: Function | None = None
    custom: Custom | None = None

    def __post_init__(self) -> None:
        _require(self.type, getattr(self, self.type))

    @property
    def as_function(self) -> Function:
        """The tool as the model sees it."""
        if self.type == "custom" and self.custom is not None:
            # A schema of its own grammar is strict: every input is promised to follow it.
            schema, is_enforced = input_schema(self.custom)
            return Function(
                name=self.custom.name, description=self.custom.told, parameters=schema, strict=is_enforced or None
            )
        assert self.function is not None
        return self.function


class FunctionName(msgspec.Struct):
    """The name of a tool."""

    name: str


class AllowedFunction(msgspec.Struct, kw_only=True):
    """One of the tools that may be called."""

    type: ToolType = "function"
    function: FunctionName | None = None
    custom: FunctionName | None = None

    def __post_init__(self) -> None:
        _require(self.type, getattr(self, self.type))

    @property
    def name(self) -> str:
        """The tool's name."""
        named = self.custom if self.type == "custom" else self.function
        assert named is not None
        return named.name


class AllowedTools(msgspec.Struct, kw_only=True):
    """Some of the tools that are offered: no others may be called. With the mode "required" one of them must be."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[AllowedFunction]


class ToolChoice(msgspec.Struct, kw_only=True):
    """The tool that must be called, or those that may be."""

    type: Literal["function", "custom", "allowed_tools"] = "function"
    function: FunctionName | None = None
    custom: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    @property
    def names(self) -> list[str]:
        """Names of the tools that may be called."""
        if self.allowed_tools is not None:
            return [tool.name for tool in self.allowed_tools.tools]
        return [named.name for named in (self.function, self.custom) if named is not None]


def must_call(choice: str | ToolChoice | None) -> bool:
    """Return true if the answer has to be a call."""
    if isinstance(choice, ToolChoice) and choice.allowed_tools is not None:
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, ToolChoice)


def is_chosen(choice: str | ToolChoice | None) -> bool:
    """Return true if the client has named the one function to be called."""
    return isinstance(choice, ToolChoice) and choice.allowed_tools is None


class FunctionCall(msgspec.Struct, kw_only=True):
    """The function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the model has made."""

    id: str
    type: ToolType = "function"
    function: FunctionCall | UnsetType | None = UNSET
    custom: CustomCall | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        _require(self.type, getattr(self, self.type))

    @property
    def as_function(self) -> FunctionCall:
        """The call as the model sees it."""
        if self.type == "custom" and self.custom:
            return FunctionCall(name=self.custom.name, arguments=self.custom.arguments)
        assert self.function
        return self.function


class FunctionCallDelta(msgspec.Struct, kw_only=True):
    """The new part of a call: first the name, then pieces of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """The new part of call `index` of an answer. Its first piece has its id and name."""

    index: int
    id: str | UnsetType = UNSET
    type: ToolType | UnsetType = UNSET
    function: FunctionCallDelta | UnsetType = UNSET
    custom: CustomCallDelta | UnsetType = UNSET


def check_tools(tools: list[ToolDefinition] | None, choice: str | ToolChoice | None) -> None:
    """Raise InvalidRequest, naming the field, for invalid tools or an invalid choice."""
    tools = tools or []
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} entries, at most {MAX_TOOLS} are allowed", param="tools")
    names = set()
    for index, tool in enumerate(tools):
        param = f"tools[{index}].{tool.type}.name"
        name = tool.as_function.name
        if _NAME.fullmatch(name) is None:
            raise InvalidRequest(f"{param} must have 1 to 128 letters, digits, dots, _ or -", param=param)
        if name in names:
            raise InvalidRequest(f"{param}: there are two tools of the name {name!r}", param=param)
        names.add(name)
    if isinstance(choice, ToolChoice):
        values = (("function", choice.function), ("custom", choice.custom), ("allowed_tools", choice.allowed_tools))
        for name, value in values:
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
                "name": function.name,
                "description": function.description or "",
                "parameters": NO_PARAMETERS if function.parameters is None else function.parameters,
            },
        }
        for function in (tool.as_function for tool in tools)
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
            function.name,
            NO_PARAMETERS if function.parameters is None else function.parameters,
            is_strict=bool(function.strict),
        )
        for function in (tool.as_function for tool in tools)
    ]


def custom_names(tools: list[ToolDefinition]) -> frozenset[str]:
    """Return the names of the tools that take a text."""
    return frozenset(tool.custom.name for tool in tools if tool.type == "custom" and tool.custom is not None)
