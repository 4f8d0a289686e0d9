"""POST /tokenize and /detokenize, compatible with vLLM's; GET /version."""

from typing import Any, ClassVar, Literal

import msgspec

from jaxserve.answers.tools.definitions import ToolChoice, ToolDefinition
from jaxserve.errors import InvalidRequest
from jaxserve.server.protocol.common import Effort, Reasoning, RequestBody, Verbosity
from jaxserve.server.protocol.fields import Route
from jaxserve.server.protocol.messages import ChatMessage


class TokenizeRequest(RequestBody, kw_only=True):
    """Either a `prompt` or the `messages` of a chat."""

    route: ClassVar[Route] = "tokenize"

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    verbosity: Verbosity | None = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """The token ids, and their texts if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids to be decoded."""

    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct):
    """The text."""

    prompt: str


class Version(msgspec.Struct):
    """The version of jaxserve."""

    version: str


class Load(msgspec.Struct):
    """Number of requests that the engine runs or has waiting."""

    server_load: int


class Health(msgspec.Struct):
    """`ok`, or the reason why not."""

    status: str


def check_tokenize_request(body: TokenizeRequest) -> None:
    """Raise InvalidRequest unless there is exactly one of `prompt` and `messages`."""
    if (body.prompt is None) != bool(body.messages):
        raise InvalidRequest("give either prompt or messages", param="prompt")
