"""POST /v1/chat/completions: the request, its messages, and the structure of the answer."""

import re
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.answers.message import AssistantMessage, ChatFinishReason, Delta
from jaxserve.answers.tools.definitions import ToolChoice, ToolDefinition, check_tools
from jaxserve.errors import InvalidRequest
from jaxserve.request import Logprob
from jaxserve.sampling_params import StructuredOutputs
from jaxserve.server.protocol.common import (
    Effort,
    GenerationRequest,
    NotNegative,
    NumLogprobs,
    Reasoning,
    Verbosity,
    check_choices,
    check_generation_request,
)
from jaxserve.server.protocol.fields import Route
from jaxserve.server.protocol.messages import ChatMessage, last_content
from jaxserve.server.protocol.usage import Usage

_JSON = re.compile(r"[{\[].*", re.DOTALL)
"""What may be a JSON text, with what follows it."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
"""A string of JSON, whose end may be missing."""


class ChatRequest(GenerationRequest, kw_only=True):
    """The body of POST /v1/chat/completions."""

    route: ClassVar[Route] = "chat"

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    verbosity: Verbosity | None = None
    echo: bool | None = None

    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: NotNegative | None = None

    @property
    def num_logprobs(self) -> int | None:
        """`SamplingParams.logprobs` of this request."""
        return (self.top_logprobs or 0) if self.logprobs or self.logprob_token_ids else None


class ChatBatchRequest(ChatRequest, kw_only=True):
    """The body of POST /v1/chat/completions/batch: several conversations, and fields for all of them."""

    messages: list[list[ChatMessage]]  # pyright: ignore[reportIncompatibleVariableOverride]


def check_chat_request(body: ChatRequest) -> None:
    """Raise InvalidRequest, naming the field, for what cannot be served."""
    check_generation_request(body)
    check_choices(1, body.n)
    check_tools(body.tools, body.tool_choice)
    if body.echo and not body.continue_final_message:
        raise InvalidRequest("echo needs continue_final_message", param="echo")
    if body.max_completion_tokens is not None and body.max_completion_tokens < 1:
        raise InvalidRequest("max_completion_tokens must be at least 1", param="max_completion_tokens")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")


def check_continued(body: ChatRequest, constraint: StructuredOutputs) -> None:
    """Raise InvalidRequest if the answer, which is a JSON text of its own, would continue one that has begun in the
    last message.
    """
    if not body.continue_final_message or not body.messages or (constraint.json is None and not constraint.json_object):
        return
    text = last_content(body.messages)
    begun = _JSON.search(text)
    if begun and (_is_open(text) or _is_open(_STRING.sub("", begun[0]))):
        raise InvalidRequest(
            f"{body.constraint_field}: the answer is a whole JSON text, and the last message, which it continues, has "
            "begun one already: leave that beginning out",
            param=body.constraint_field,
        )


def _is_open(text: str) -> bool:
    return text.count("{") > text.count("}") or text.count("[") > text.count("]")


class TopLogprob(msgspec.Struct):
    """One candidate token: its text, its log probability, and its UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The chosen token and the most likely ones at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities, one entry per generated token."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer of n. `prompt_token_ids` are here if each answers a conversation of its own."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """The new part of one answer of n."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(msgspec.Struct, kw_only=True):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
