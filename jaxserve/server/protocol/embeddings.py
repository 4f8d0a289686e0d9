"""POST /v1/embeddings: the request and the structure of the answer."""

from typing import Any, ClassVar, Literal

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.request import Pooling, TruncationSide
from jaxserve.server.protocol.common import CacheSalt, Priority, RequestBody, RequestId
from jaxserve.server.protocol.completions import Prompt, parse_prompts
from jaxserve.server.protocol.fields import Route
from jaxserve.server.protocol.messages import ChatMessage
from jaxserve.server.protocol.utility import TokenizeRequest

MAX_INPUTS = 2048


class EmbeddingRequest(RequestBody, kw_only=True):
    """The body: `input`, or the `messages` of one conversation."""

    route: ClassVar[Route] = "embeddings"

    input: str | list[Any] | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = None
    endianness: Literal["native", "little", "big"] | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    prompt_name: str | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    request_id: RequestId | None = None

    def prompts(self) -> list[Prompt]:
        """Return the inputs, each a text or a list of token ids. Raises InvalidRequest."""
        prompts = parse_prompts("input", [] if self.input is None else self.input)
        if len(prompts) > MAX_INPUTS:
            raise InvalidRequest(f"input has {len(prompts)} entries, at most {MAX_INPUTS} are allowed", param="input")
        return prompts

    def conversation(self) -> TokenizeRequest:
        """Return the messages for the chat template, by default without the prompt for an answer."""
        return TokenizeRequest(
            messages=self.messages,
            add_generation_prompt=bool(self.add_generation_prompt),
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
            documents=self.documents,
        )

    @property
    def is_normalized(self) -> bool | None:
        """True if vectors are scaled to length 1, None if the model decides."""
        return self.use_activation if self.normalize is None else self.normalize


def check_embedding_request(body: EmbeddingRequest) -> None:
    """Raise InvalidRequest, naming the field, for what cannot be served."""
    if (body.input is None) == (body.messages is None):
        param = "input" if body.messages is None else "messages"
        raise InvalidRequest("give either input or messages", param=param)
    if body.messages is not None and body.prompt_name is not None:
        raise InvalidRequest("a prompt comes before input: write it into messages", param="prompt_name")
    if body.normalize is not None and body.use_activation not in (None, body.normalize):
        raise InvalidRequest("use_activation and normalize contradict each other", param="use_activation")


class Embedding(msgspec.Struct, kw_only=True):
    """One vector: numbers, or base64 of the requested dtype, little-endian float32 by default."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    """Number of tokens processed."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    """All vectors, in the order of the inputs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
