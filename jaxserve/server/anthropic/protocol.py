"""POST /v1/messages: the request and the answer, in the shapes of Anthropic's API."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.server.protocol.common import Effort

Block = dict[str, Any]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Message(msgspec.Struct, kw_only=True):
    """One message of the conversation: its text, or content blocks.

    A system message with `clear_at` "next_user_message" is not read once a message of the user follows.
    """

    role: Literal["user", "assistant", "system"]
    content: str | list[Block] | None = None
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: Any = None

    @property
    def blocks(self) -> list[Block]:
        """The content blocks; none of a text."""
        return self.content if isinstance(self.content, list) else []


_OfServerTools = msgspec.defstruct(
    "_OfServerTools",
    [
        (name, Any, None)
        for name in (
            *("allowed_domains", "blocked_domains", "caching", "citations", "configs", "default_config"),
            *("display_height_px", "display_number", "display_width_px", "enable_zoom", "max_characters"),
            *("max_content_tokens", "max_tokens", "max_uses", "mcp_server_name", "model", "response_inclusion"),
            *("tools", "use_cache", "user_location"),
        )
    ],
    kw_only=True,
)
"""Fields of Anthropic's own tools, which change nothing here."""


class ToolDefinition(_OfServerTools, kw_only=True):
    """A tool that the model may call.

    `type` is absent or "custom" for a tool with an `input_schema`, or names one of Anthropic's own. A tool with
    `defer_loading` is offered when a `tool_reference` has named it.
    """

    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    defer_loading: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: list[str] | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """How the model may call tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """How the model thinks before it answers; `budget_tokens` limits the tokens of its thoughts.

    With `display` "omitted" blocks of thoughts are empty. `block_binding` is about signatures, which this server does
    not write.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None
    block_binding: Any = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """A JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """How much effort the answer takes, and its format."""

    effort: Effort | None = None
    format: OutputFormat | None = None
    task_budget: Any = None


class ContextManagement(msgspec.Struct, kw_only=True):
    """Edits of the conversation before the model reads it; see `context`."""

    edits: list[Block] | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[Message]
    system: str | list[Block] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    mcp_servers: Any = None
    cache_control: Any = None
    context_management: ContextManagement | None = None
    compaction: Any = None
    speed: str | None = None
    billing_policy: Any = None
    betas: Any = None
    anthropic_beta: Any = None
    anthropic_version: Any = None


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
    thread: Any = None
    diagnostics: Any = None
    fallbacks: Any = None
    fallback_credit_token: Any = None


class OutputTokensDetails(msgspec.Struct):
    """`thinking_tokens`: output tokens that are thoughts."""

    thinking_tokens: int


class MessagesUsage(msgspec.Struct, kw_only=True):
    """Numbers of tokens. `input_tokens` leaves out those whose KV was cached, and those that `cache_control` asks to
    cache.
    """

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET


class AppliedEdit(msgspec.Struct, kw_only=True):
    """What an edit of the conversation has removed."""

    type: str
    cleared_input_tokens: int
    cleared_tool_uses: int | UnsetType = UNSET
    cleared_thinking_turns: int | UnsetType = UNSET


class AppliedEdits(msgspec.Struct, kw_only=True):
    """The edits that have removed something."""

    applied_edits: list[AppliedEdit]


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
    context_management: AppliedEdits | UnsetType = UNSET


class OriginalCount(msgspec.Struct):
    """The number of tokens before the conversation was edited."""

    original_input_tokens: int


class TokenCount(msgspec.Struct):
    """The answer of POST /v1/messages/count_tokens."""

    input_tokens: int
    context_management: OriginalCount | UnsetType = UNSET
