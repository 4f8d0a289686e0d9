"""An answer as clients of chats read it: the message as a whole, or in pieces."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.answers.tools.definitions import ToolCall, ToolCallDelta
from jaxserve.request import FinishReason

ChatFinishReason = FinishReason | Literal["tool_calls"]


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The model's message. `reasoning_content` is another name for `reasoning`."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Delta(msgspec.Struct, kw_only=True):
    """The new part of a message in a chunk: the role first, then thoughts, text and calls."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
