"""POST /v1/score and /v1/rerank: the requests and the structure of the answers."""

from typing import Any, Literal

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.request import Pooling, TruncationSide
from jaxserve.server.protocol.common import CacheSalt, NotNegative, Priority, RequestId
from jaxserve.server.protocol.embeddings import MAX_INPUTS, EmbeddingUsage

_NOT_OF_EMBEDDINGS = ("user", "use_activation", "padding")


class PoolingRequest(msgspec.Struct, kw_only=True):
    """What all requests have."""

    model: str | None = None
    pooling: Pooling | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    request_id: RequestId | None = None
    user: str | None = None
    use_activation: bool | None = None
    padding: Literal["do_not_pad"] | None = None

    def options(self) -> dict[str, Any]:
        """Return the fields that a request for embeddings has too."""
        return {
            name: getattr(self, name) for name in PoolingRequest.__struct_fields__ if name not in _NOT_OF_EMBEDDINGS
        }


class ScoringRequest(PoolingRequest, kw_only=True):
    """What /v1/score and /v1/rerank have."""

    instruct: str | None = None
    max_tokens_per_query: NotNegative | None = None
    max_tokens_per_doc: NotNegative | None = None


_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class ScoreRequest(ScoringRequest, kw_only=True):
    """The body of POST /v1/score: each text of `text_2` is compared with the one of `text_1`, or with its own.

    Both have several names, as vLLM's have.
    """

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None

    def names(self) -> tuple[str, str]:
        """Return the names of the fields with the two texts of each pair. Raises InvalidRequest for several pairs."""
        given = [name for name in dict.fromkeys(name for pair in _NAMES for name in pair) if getattr(self, name)]
        best = max(_NAMES, key=lambda pair: len(set(pair).intersection(given)))
        if surplus := [name for name in given if name not in best]:
            raise InvalidRequest(f"give {' and '.join(best)}, or {surplus[0]} instead", param=surplus[0])
        return best

    def pairs(self) -> list[tuple[str, str]]:
        """Return the texts to compare. Raises InvalidRequest."""
        name_1, name_2 = self.names()
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
    top_n: NotNegative | None = None
    return_documents: bool | None = None

    def names(self) -> tuple[str, str]:
        """Return the names of the fields with the two texts of each pair."""
        return "query", "documents"

    def pairs(self) -> list[tuple[str, str]]:
        """Return the texts to compare. Raises InvalidRequest."""
        return [(self.query, text) for text in self.texts()]

    def texts(self) -> list[str]:
        """Return the documents. Raises InvalidRequest."""
        return _texts("documents", [each if isinstance(each, str) else each.text for each in self.documents])


AnyScoring = ScoreRequest | RerankRequest


class ClassifyRequest(PoolingRequest, kw_only=True):
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
    """How well the second text of a pair fits the first: a reranker's score, or the cosine of their vectors."""

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
    if given is None:
        raise InvalidRequest(f"{name}: this field is required", param=name)
    texts = [given] if isinstance(given, str) else given
    if not given:
        raise InvalidRequest(f"{name} must not be empty", param=name)
    if len(texts) > MAX_INPUTS:
        raise InvalidRequest(f"{name} has {len(texts)} entries, at most {MAX_INPUTS} are allowed", param=name)
    for index, text in enumerate(texts):
        if not text:
            raise InvalidRequest(f"{name}[{index}] must not be empty", param=f"{name}[{index}]")
    return texts
