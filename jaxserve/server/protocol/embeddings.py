"""POST /v1/embeddings: the request and the shape of the answer."""

from typing import Any, ClassVar, Literal

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.request import Pooling, TruncationSide
from jaxserve.server.protocol.common import RequestBody, check_priority_and_salt, check_request_id
from jaxserve.server.protocol.completions import Prompt, parse_prompts
from jaxserve.server.protocol.fields import Route

MAX_INPUTS = 2048


class EmbeddingRequest(RequestBody, kw_only=True):
    """The body. `pooling` and `normalize` are extensions: what the vector is made of, and whether it has length 1."""

    route: ClassVar[Route] = "embeddings"

    input: str | list[Any]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    def prompts(self) -> list[Prompt]:
        """The inputs, each a text or a list of token ids. Raises InvalidRequest."""
        prompts = parse_prompts("input", self.input)
        if len(prompts) > MAX_INPUTS:
            raise InvalidRequest(f"input has {len(prompts)} entries, at most {MAX_INPUTS} are allowed", param="input")
        check_priority_and_salt(self.priority, self.cache_salt)
        check_request_id(self.request_id)
        return prompts


class Embedding(msgspec.Struct, kw_only=True):
    """One vector: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    """Tokens read."""

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
