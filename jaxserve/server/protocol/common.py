"""Fields and checks common to completions and chat: from the bytes of a body to SamplingParams.

None means absent throughout. SamplingParams checks the ranges of its own parameters, the types of fields other ranges;
limits and combinations are checked here.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

import msgspec
from msgspec import Meta

from jaxserve.decoding import VISIBLE, decoded
from jaxserve.errors import InvalidRequest
from jaxserve.request import TruncationSide
from jaxserve.sampling_params import MAX_INT32, MAX_N, PARAMETERS, SamplingParams
from jaxserve.server.protocol import fields
from jaxserve.server.protocol.fields import Route
from jaxserve.server.protocol.names import UnknownName, unknown_names
from jaxserve.server.protocol.structured import (
    ResponseFormat,
    StructuredOutputsBody,
    constraint_field,
    structured_outputs,
)
from jaxserve.unsupported import Refused, refuse

MAX_CHOICES = 1024  # prompts times n of one HTTP request
_DIGITS = re.compile(r"[0-9]{1,20}")

Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]
RequestId = Annotated[str, Meta(pattern=VISIBLE)]
NumLogprobs = Annotated[int, Meta(ge=-1, le=MAX_INT32)]
"""A number of most likely tokens, or -1 for all. How many there may be, the engine says."""
NotNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class StreamOptions(msgspec.Struct, kw_only=True):
    """`include_usage`: a last chunk with the usage; with `continuous_usage_stats`, each chunk has the usage so far.

    `include_obfuscation`, which pads all chunks to one length, is not supported.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class RequestBody(msgspec.Struct, kw_only=True):
    """The body of a route with a column in the table of fields. Its own fields are those that the route follows."""

    route: ClassVar[Route]

    model: str | None = None


class Reasoning(msgspec.Struct, kw_only=True):
    """`reasoning` of a request."""

    effort: Effort | None = None
    summary: str | None = None


if TYPE_CHECKING:
    _Sampled = RequestBody
else:  # ranges are checked by SamplingParams, by the same rules as in Python
    _kinds = get_type_hints(SamplingParams)
    _fields = [(name, _kinds[name] | None, None) for name, parameter in PARAMETERS.items() if parameter.is_field]
    _Sampled = msgspec.defstruct("_Sampled", _fields, bases=(RequestBody,), kw_only=True)


class AnswerRequest(_Sampled, kw_only=True):
    """Fields common to completions, chat and responses: all that `PARAMETERS` says are fields, and these."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_tokens: int | None = None
    logprob_token_ids: list[int] | None = None
    logit_bias: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: StructuredOutputsBody | None = None


class GenerationRequest(AnswerRequest, kw_only=True):
    """Fields common to completions and chat."""

    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    request_id: RequestId | None = None
    response_format: ResponseFormat | None = None

    @property
    def token_limit(self) -> int | None:
        """`max_tokens`, under either of its names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_limit_field(self) -> str:
        """The name under which `max_tokens` was sent."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def constraint_field(self) -> str | None:
        """The field that constrains the answer's text, or None."""
        return constraint_field(self.response_format, self.structured_outputs)

    @property
    def is_strict(self) -> bool:
        """False if what no grammar can follow may be left out of the answer's schema."""
        return self.response_format is None or self.response_format.is_strict

    @property
    def wants_numbers(self) -> bool:
        """True if events of a stream need token ids or usage as well as text."""
        options = self.stream_options
        counts = options is not None and options.include_usage and options.continuous_usage_stats
        return bool(self.return_token_ids or counts)


def given_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the fields of a JSON object with undecoded values. Raises InvalidRequest for any other JSON."""
    return decoded(body, dict[str, msgspec.Raw])


def decode_request[T: RequestBody](body: bytes, kind: type[T]) -> tuple[T, list[UnknownName]]:
    """Return the JSON `body` as `kind`, and its unknown names.

    Raises InvalidRequest as `decoded` does, and for a field that the route refuses.
    """
    for name, value in given_fields(body).items():
        cell = fields.cell(kind.route, name)
        if isinstance(cell, Refused):
            refuse(name, cell, decoded(bytes(value), Any, what=name))
    request = decoded(body, kind)
    known = fields.known(kind.route)
    unknown = [
        found if found.path else found._replace(known=known)
        for found in unknown_names(body, kind)
        if found.path or fields.cell(kind.route, found.name) is fields.UNKNOWN
    ]
    return request, unknown


def check_generation_request(body: GenerationRequest) -> None:
    """Refuse unsupported fields and contradictory combinations.

    Raises InvalidRequest, naming the field.
    """
    check_stream_options(body)
    if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
        raise InvalidRequest("best_of must be equal to n", param="best_of")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs is not available with stream=true", param="prompt_logprobs")


def check_stream_options(body: AnswerRequest) -> None:
    """Raise InvalidRequest, naming the field, for invalid or unsupported stream options."""
    if body.stream_options is None:
        return
    if not body.stream:
        raise InvalidRequest("stream_options is only allowed with stream=true", param="stream_options")
    if body.stream_options.include_obfuscation:
        raise not_supported("stream_options.include_obfuscation", "padding of chunks")


def refuse_unless_empty(name: str, value: Any) -> None:
    """Raise InvalidRequest if an unsupported field has a value that means something."""
    if value is not None and value is not False and value not in ("", [], {}):
        raise not_supported(name, name)


def rename(error: InvalidRequest, old: str, new: str) -> None:
    """Rename the field `old` of an error to the name that the client has sent, also at the beginning of its message.

    What follows the name in `param` (an index, a field of it) is kept.
    """
    if error.param is None or re.match(rf"{re.escape(old)}($|[\[.])", error.param) is None:
        return
    error.param = new + error.param.removeprefix(old)
    if error.message.startswith(old):
        error.message = new + error.message.removeprefix(old)
        error.args = (error.message,)


def not_supported(param: str, what: str) -> InvalidRequest:
    """Return the error for something that the API defines and this server does not support."""
    return InvalidRequest(f"{what} is not supported", param=param, code="unsupported_parameter")


def content_not_supported(param: str, kind: Any) -> InvalidRequest:
    """Return the error for a part of a message that is no text: images, sound, video, files."""
    message = f"content of type {str(kind)[:40]!r} is not supported: only text is served"
    return InvalidRequest(message, param=param, code="unsupported_parameter")


def sampling_params(
    body: GenerationRequest,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    vocab_size: int,
) -> SamplingParams:
    """Make SamplingParams of a request: its own fields, else the model's `defaults`, else the API's.

    Raises InvalidRequest, naming the field, for a value out of range. If keys of `logit_bias` are malformed, the
    message names those outside the vocabulary, too.
    """
    chosen: dict[str, Any] = {}
    for name in fields.SAMPLING:
        value = getattr(body, name)
        if value is None:
            value = defaults.get(name)
        if value is not None:
            chosen[name] = value
    try:
        return SamplingParams(
            **chosen,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=structured_outputs(body.response_format, body.structured_outputs),
        )
    except InvalidRequest as error:
        if error.param != "logit_bias":
            raise
        outside = [key for key in chosen["logit_bias"] if _DIGITS.fullmatch(str(key)) and int(key) >= vocab_size]
        more = f"; outside the vocabulary of {vocab_size}: {', '.join(map(str, outside))}" if outside else ""
        raise InvalidRequest(error.message + more, param=error.param, code=error.code) from None


def check_choices(num_prompts: int, n: int | None) -> None:
    """Raise InvalidRequest if one HTTP request asks for too many continuations."""
    if n is not None and not 1 <= n <= MAX_N:
        raise InvalidRequest(f"n must be in [1, {MAX_N}], got {n}", param="n")
    if num_prompts * (n or 1) > MAX_CHOICES:
        raise InvalidRequest(
            f"{num_prompts} prompts with n={n or 1} are too many: at most {MAX_CHOICES} choices a request",
            param="prompt",
        )
