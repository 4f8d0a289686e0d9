"""POST /v1/responses: the request, its items, and the structure of the answer. A conversation is a list of items."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from jaxserve.errors import InvalidRequest
from jaxserve.server.protocol.chat import TokenLogprob
from jaxserve.server.protocol.common import (
    AnswerRequest,
    Effort,
    NotNegative,
    NumLogprobs,
    Positive,
    Reasoning,
    Verbosity,
    check_stream_options,
    not_supported,
)
from jaxserve.server.protocol.fields import Route
from jaxserve.server.protocol.items import InputItem
from jaxserve.server.protocol.names import STRUCTS

LOGPROBS = "message.output_text.logprobs"
"""Entry of `include` that requests log probabilities."""
IGNORED_INCLUDES = frozenset({"reasoning.encrypted_content"})

Text = Annotated[str, Meta(max_length=512)]
"""A text that comes back in the response."""
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], Text], Meta(max_length=16)]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The constraint on the text: anything, JSON, or JSON of a schema. Unknown fields are errors, as they may be
    constraints.
    """

    type: str
    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`text` of a request."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function that the model may call. One with `defer_loading` is offered like any other: nothing searches it."""

    type: str
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    output_schema: Any = None


class CustomToolFormat(msgspec.Struct, kw_only=True):
    """What a custom tool takes: any text, or that of a grammar."""

    type: Literal["text", "grammar"] = "text"
    definition: str | None = None
    syntax: str | None = None


class CustomTool(msgspec.Struct, kw_only=True):
    """A tool that takes a text."""

    type: str
    name: str
    description: str | None = None
    format: CustomToolFormat | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class NamespaceTool(msgspec.Struct, kw_only=True):
    """Tools under a common name."""

    type: str
    name: str
    description: str | None = None
    tools: list[dict[str, Any]]


HostedTool = msgspec.defstruct(
    "HostedTool",
    [
        (name, Any, None)
        for name in (
            *("action", "allowed_tools", "authorization", "background", "connector_id", "container", "display_height"),
            *("display_width", "environment", "execution", "external_web_access", "filters", "headers"),
            *("image_settings", "input_fidelity", "input_image_mask", "max_num_results", "model", "moderation"),
            *("output_compression", "output_format", "partial_images", "quality", "ranking_options"),
            *("require_approval", "search_content_types", "search_context_size", "server_description"),
            *("server_label", "server_url", "size", "tunnel_id", "user_location", "vector_store_ids"),
        )
    ],
)
"""Fields of the tools that OpenAI's servers run."""

_TOOLS = (FunctionTool, CustomTool, NamespaceTool, HostedTool)
AnyTool = Annotated[dict[str, Any], Meta(extra={STRUCTS: _TOOLS})]
"""A tool of any type, as it was sent."""


class AllowedFunction(msgspec.Struct, kw_only=True):
    """A tool that may be called."""

    type: str
    name: str | None = None
    namespace: str | None = None
    server_label: str | None = None


class ToolChoiceFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The tool that the model must call, or with the type allowed_tools those that it may call."""

    type: str
    name: str | None = None
    namespace: str | None = None
    server_label: str | None = None
    mode: str | None = None
    tools: list[Annotated[dict[str, Any], Meta(extra={STRUCTS: (AllowedFunction,)})]] | None = None


class ResponsesRequest(AnswerRequest, kw_only=True):
    """The body of POST /v1/responses."""

    route: ClassVar[Route] = "responses"

    input: str | list[InputItem]
    instructions: str | list[InputItem] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: Metadata | None = None
    max_output_tokens: Positive | None = None
    top_logprobs: NumLogprobs | None = None
    include: list[str] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: Effort | None = None
    tools: list[AnyTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceFunction | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: NotNegative | None = None
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    service_tier: Text | None = None

    @property
    def token_limit(self) -> int | None:
        """`max_output_tokens`, under any of its names."""
        return getattr(self, self.token_limit_field)

    @property
    def token_limit_field(self) -> str:
        """The name under which `max_output_tokens` was sent."""
        names = ("max_output_tokens", "max_completion_tokens", "max_tokens")
        return next((name for name in names if getattr(self, name) is not None), names[0])

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer includes log probabilities."""
        return LOGPROBS in (self.include or ())


def check_responses_request(body: ResponsesRequest) -> None:
    """Raise InvalidRequest, naming the field, for what cannot be served and is not checked for chats too."""
    for entry in body.include or ():
        if entry != LOGPROBS and entry not in IGNORED_INCLUDES:
            raise not_supported("include", f"including {entry[:64]!r}")
    if body.background and body.store is False:
        raise InvalidRequest("background needs store=true", param="background")
    check_stream_options(body)
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        raise not_supported("stream_options.continuous_usage_stats", "usage before the end")


class OutputText(msgspec.Struct, kw_only=True):
    """A text that the model has written."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningText(msgspec.Struct, kw_only=True):
    """A text of the model's thoughts."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's thoughts before its message."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[dict[str, Any]] = []
    content: list[ReasoningText]


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the model requests; its result comes as a `function_call_output` item of the next turn."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool; its result comes as a `custom_tool_call_output` item of the next turn."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | ReasoningItem | FunctionCall | CustomToolCall


def without_logprobs(item: OutputItem) -> OutputItem:
    """Return an item without log probabilities, which later turns do not need."""
    if not isinstance(item, OutputMessage):
        return item
    content = [msgspec.structs.replace(part, logprobs=[]) for part in item.content]
    return msgspec.structs.replace(item, content=content)


class ResponseError(msgspec.Struct):
    """The reason why a response has failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """The reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(msgspec.Struct):
    """`cached_tokens`: input tokens whose KV came from the prefix cache. Tokens written to it are not counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """`reasoning_tokens`: output tokens that are thoughts."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Tokens read and written."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseBody(msgspec.Struct, kw_only=True):
    """The answer at any stage; most of it repeats the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | list[dict[str, Any]] | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Reasoning
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceFunction
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"] = "disabled"
    user: str | UnsetType = UNSET
    safety_identifier: str | UnsetType = UNSET
    prompt_cache_key: str | UnsetType = UNSET
    service_tier: str | None = None
    usage: ResponseUsage | UnsetType = UNSET


class DeletedResponse(msgspec.Struct, kw_only=True):
    """The confirmation that a stored response was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(msgspec.Struct, kw_only=True):
    """The input items of a stored response, in order."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
