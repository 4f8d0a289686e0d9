"""POST /v1/completions: the request, its prompts, and the structure of the answer."""

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.errors import InvalidRequest
from jaxserve.request import FinishReason, Logprob
from jaxserve.server.protocol.common import GenerationRequest, check_choices, check_generation_request
from jaxserve.server.protocol.fields import Route
from jaxserve.server.protocol.usage import Usage

DEFAULT_MAX_TOKENS = 16

type Prompt = str | list[int]


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of POST /v1/completions. `max_tokens` may be 0 together with `echo`: score the prompt only."""

    route: ClassVar[Route] = "completions"

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        """`SamplingParams.logprobs` of this request."""
        return 0 if self.logprobs is None and self.logprob_token_ids else self.logprobs

    def prompts(self) -> list[Prompt]:
        """Return the prompts, each a text or a list of token ids. Raises InvalidRequest."""
        return parse_prompts("prompt", self.prompt)

    @property
    def output_limit(self) -> int:
        """`SamplingParams.max_tokens` of this request, which is at least 1."""
        if self.is_score_only:
            return 1
        return DEFAULT_MAX_TOKENS if self.token_limit is None else self.token_limit

    @property
    def is_score_only(self) -> bool:
        """True if the prompt is only scored and nothing is generated."""
        return self.token_limit == 0


def parse_prompts(name: str, given: str | list[Any]) -> list[Prompt]:
    """Convert one text, token ids, or a list of texts and lists of token ids to a list of prompts.

    Raises InvalidRequest, naming the field `name`, for anything else.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest(f"{name} must not be empty", param=name)
    if _is_token_ids(given):
        return [given]
    if all(isinstance(entry, str) or (isinstance(entry, list) and entry and _is_token_ids(entry)) for entry in given):
        return given
    raise InvalidRequest(f"{name} must be a text, token ids, or a list of texts and lists of token ids", param=name)


def _is_token_ids(entries: list[Any]) -> bool:
    return all(type(entry) is int for entry in entries)  # type(): a bool is not a token id


def check_completion_request(body: CompletionRequest, prompts: list[Prompt]) -> None:
    """Raise InvalidRequest, naming the field, for what cannot be served."""
    check_generation_request(body)
    check_choices(len(prompts), body.n)
    if body.is_score_only and not body.echo:
        raise InvalidRequest("max_tokens must be at least 1 without echo", param="max_tokens")
    if body.is_score_only and body.min_tokens:
        raise InvalidRequest("min_tokens must not exceed max_tokens (0)", param="min_tokens")


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists with one entry per token. The first token of an echoed prompt has None, as nothing predicts it."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One continuation or, in a stream, its new part, in which null fields may be absent."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """The whole answer, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
