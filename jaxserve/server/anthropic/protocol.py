"""POST /v1/messages: the request and the answer, in the shapes of Anthropic's API."""

from typing import Any, Literal

import msgspec

from jaxserve.server.protocol.common import Effort

Block = dict[str, Any]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Message(msgspec.Struct, kw_only=True):
    """One message of the conversation: its text, or content blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(msgspec.Struct, kw_only=True):
    """A tool that the model may call. Only tools that the client runs are supported: `type` is absent or "custom"."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    defer_loading: bool | None = None
    input_examples: Any = None
    eager_input_streaming: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """How the model may call tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """How the model thinks before it answers; `budget_tokens` limits the tokens of its thoughts."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """A JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """How much effort the answer takes, and its format."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[Message]
    system: str | list[Block] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    mcp_servers: Any = None
    cache_control: Any = None
    context_management: Any = None


class MessagesRequest(CountRequest, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Any = None
    service_tier: str | None = None
    container: Any = None
    inference_geo: str | None = None


class MessagesUsage(msgspec.Struct, kw_only=True):
    """Numbers of tokens. `input_tokens` leaves out those whose KV was cached."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessagesResponse(msgspec.Struct, kw_only=True):
    """The whole answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class TokenCount(msgspec.Struct):
    """The answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong; `param` names the field of the request."""

    type: str
    message: str
    param: str | None = None


class ErrorBody(msgspec.Struct, kw_only=True):
    """The body of an answer that is not a success."""

    type: Literal["error"] = "error"
    error: ErrorDetail
    request_id: str
