"""POST /v1/score and /v1/rerank: the requests and the structure of the answers."""

from typing import Any, Literal

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.request import Pooling
from jaxserve.server.protocol.embeddings import MAX_INPUTS, EmbeddingUsage


class ScoringRequest(msgspec.Struct, kw_only=True):
    """What both requests have."""

    model: str | None = None
    pooling: Pooling | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None

    def options(self) -> dict[str, Any]:
        """Return the fields that a request for embeddings has too."""
        return {name: getattr(self, name) for name in ScoringRequest.__struct_fields__ if name != "user"}


class ScoreRequest(ScoringRequest, kw_only=True):
    """The body of POST /v1/score: each text of `text_2` is compared with the one of `text_1`, or with its own."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None

    def pairs(self) -> list[tuple[str, str]]:
        """Return the texts to compare. Raises InvalidRequest."""
        is_vllms = self.text_1 is None and self.text_2 is None and (self.queries or self.documents)
        name_1, name_2 = ("queries", "documents") if is_vllms else ("text_1", "text_2")
        first = _texts(name_1, getattr(self, name_1))
        second = _texts(name_2, getattr(self, name_2))
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"{name_1} must have one text, or as many as {name_2}: {len(first)} and {len(second)}", param=name_1
            )
        return list(zip(first * (len(second) if len(first) == 1 else 1), second, strict=True))


class Document(msgspec.Struct):
    """A text that is ranked."""

    text: str


class RerankRequest(ScoringRequest, kw_only=True):
    """The body of POST /v1/rerank: `documents` are sorted by how near they are to `query`."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None

    def texts(self) -> list[str]:
        """Return the documents. Raises InvalidRequest."""
        if self.top_n is not None and self.top_n < 0:
            raise InvalidRequest(f"top_n must not be negative, got {self.top_n}", param="top_n")
        return _texts("documents", [each if isinstance(each, str) else each.text for each in self.documents])


class ClassifyRequest(ScoringRequest, kw_only=True):
    """The body of POST /classify, as vLLM has it."""

    input: str | list[Any]
    add_special_tokens: bool | None = None


class Classification(msgspec.Struct, kw_only=True):
    """The most probable label of an input, and the probabilities of all, in the order of the model's config."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyResponse(msgspec.Struct, kw_only=True):
    """A classification of each input, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: EmbeddingUsage


class Score(msgspec.Struct, kw_only=True):
    """Cosine of the angle between the vectors of two texts."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(msgspec.Struct, kw_only=True):
    """A score for each pair, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RankedDocument(msgspec.Struct, kw_only=True):
    """A document and how near it is to the query; `index` says which of the request it is."""

    index: int
    document: Document | None
    relevance_score: float


class RerankResponse(msgspec.Struct, kw_only=True):
    """The documents, the nearest first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


def _texts(name: str, given: str | list[str] | None) -> list[str]:
    texts = [given] if isinstance(given, str) else given or []
    if not texts:
        raise InvalidRequest(f"{name}: this field is required", param=name)
    if len(texts) > MAX_INPUTS:
        raise InvalidRequest(f"{name} has {len(texts)} entries, at most {MAX_INPUTS} are allowed", param=name)
    for index, text in enumerate(texts):
        if not text:
            raise InvalidRequest(f"{name}[{index}] must not be empty", param=f"{name}[{index}]")
    return texts
