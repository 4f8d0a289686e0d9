"""POST /v1/score and /v1/rerank: how well texts fit each other, by a reranker's score or by their embeddings.

POST /classify: probabilities of labels.
"""

import asyncio
import re
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.engine.embedding import NO_HEAD, finish_embedding, pooled_vector
from jaxserve.engine.output import RequestGroup
from jaxserve.engine.scoring import NO_INSTRUCTION, PairScorer, check_pair_options, pair_scorer, shortened
from jaxserve.errors import InvalidRequest
from jaxserve.server.generation.running import while_wanted_by_client
from jaxserve.server.generation.served_model import ServedModel
from jaxserve.server.protocol.common import rename
from jaxserve.server.protocol.embeddings import EmbeddingRequest, EmbeddingUsage
from jaxserve.server.protocol.scoring import (
    AnyScoring,
    Classification,
    ClassifyRequest,
    ClassifyResponse,
    Document,
    RankedDocument,
    RerankRequest,
    RerankResponse,
    Score,
    ScoreRequest,
    ScoreResponse,
)
from jaxserve.server.routes.embeddings import embed, usage_of
from jaxserve.server.state import ServerState, server_state
from jaxserve.server.wire.body import json_response
from jaxserve.server.wire.streaming import while_wanted


async def score(request: Request) -> Response:
    """Return the score of each pair of texts."""
    state = server_state(request.scope)
    body = await state.reader.struct(request, ScoreRequest, route="score")
    scores, usage = await _scores(state, body, request)
    return json_response(
        ScoreResponse(
            id=f"score-{body.request_id or uuid.uuid4().hex}",
            created=int(time.time()),
            model=state.model.name,
            data=[Score(index=index, score=value) for index, value in enumerate(scores)],
            usage=usage,
        )
    )


async def rerank(request: Request) -> Response:
    """Return documents, the one that fits the query best first."""
    state = server_state(request.scope)
    body = await state.reader.struct(request, RerankRequest, route="rerank")
    texts = body.texts()
    scores, usage = await _scores(state, body, request)
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or None]
    is_shown = body.return_documents is not False
    results = [
        RankedDocument(
            index=index, document=Document(texts[index]) if is_shown else None, relevance_score=scores[index]
        )
        for index in order
    ]
    answer_id = f"rerank-{body.request_id or uuid.uuid4().hex}"
    return json_response(RerankResponse(id=answer_id, model=state.model.name, results=results, usage=usage))


async def classify(request: Request) -> Response:
    """Return the probabilities of the labels of each input, by the model's classification head."""
    state = server_state(request.scope)
    body = await state.reader.struct(request, ClassifyRequest, route="classify")
    head = state.model.frontend.head
    if head is None:
        raise InvalidRequest(NO_HEAD, param="model")
    options = body.options() | {"add_special_tokens": body.add_special_tokens}
    if body.pooling not in (None, "last"):
        raise InvalidRequest("pooling must be 'last': the head is for a text's last token", param="pooling")
    wanted = msgspec.convert({**options, "input": body.input, "pooling": "last"}, EmbeddingRequest)
    groups = await embed(state, wanted, request)
    data = []
    for index, group in enumerate(groups):
        assert group.embedding is not None, "a finished pooling request has a vector"
        hidden = pooled_vector(group.embedding)
        probs = head.logits(hidden).tolist() if body.use_activation is False else head.probs(hidden)
        label = head.labels[max(range(len(probs)), key=probs.__getitem__)]
        data.append(Classification(index=index, label=label, probs=probs, num_classes=len(probs)))
    return json_response(
        ClassifyResponse(
            id=f"classify-{body.request_id or uuid.uuid4().hex}",
            created=int(time.time()),
            model=state.model.name,
            data=data,
            usage=usage_of(groups),
        )
    )


async def _scores(state: ServerState, body: AnyScoring, request: Request) -> tuple[list[float], EmbeddingUsage]:
    """Return the score of each pair. Raises InvalidRequest."""
    pairs, scorer = body.pairs(), pair_scorer(state.model.frontend)
    if scorer is None:
        return await _similarities(state, body, pairs, request)
    check_pair_options(scorer, pooling=body.pooling)
    groups = await state.runner.prepare(lambda gone: _prepare(state.model, scorer, body, pairs, gone), request)
    run = state.runner.run(groups, lambda _index, _delta: None)
    await while_wanted(run, receive=request.receive, stopping=state.life.stopping)
    has_activation = body.use_activation is not False
    return [scorer.score(group, use_activation=has_activation) for group in groups], usage_of(groups)


def _prepare(
    model: ServedModel,
    scorer: PairScorer,
    body: AnyScoring,
    pairs: Sequence[tuple[str, str]],
    gone: threading.Event,
) -> list[RequestGroup]:
    """Validate and tokenize the pairs. Raises InvalidRequest, naming the second text of a pair that is too long."""
    request_id = f"score-{uuid.uuid4().hex}"
    groups = []
    for index, (query, document) in enumerate(while_wanted_by_client(_shortened(model, body, pairs), gone)):
        try:
            groups.append(
                scorer.prepare(
                    query,
                    document,
                    request_id=f"{request_id}-{index}",
                    instruction=body.instruct,
                    priority=body.priority or 0,
                    cache_salt=body.cache_salt or "",
                    truncate_prompt_tokens=body.truncate_prompt_tokens,
                    truncation_side=body.truncation_side or "left",
                )
            )
        except InvalidRequest as error:
            if error.param == "prompt":
                error.param = _named(body, 1, index)
            raise
    return groups


def _shortened(model: ServedModel, body: AnyScoring, pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield pairs with no more tokens than the request allows for each text. Raises InvalidRequest."""
    tokenizer = model.frontend.tokenizer
    limits = (body.max_tokens_per_query, body.max_tokens_per_doc)
    for index, pair in enumerate(pairs):
        for side, (text, limit) in enumerate(zip(pair, limits, strict=True)):
            may_exceed = bool(limit) or body.truncate_prompt_tokens is not None
            model.check_text_length(text, may_exceed=may_exceed, param=_named(body, side, index))
        first, second = (shortened(text, tokenizer, limit) for text, limit in zip(pair, limits, strict=True))
        yield first, second


def _named(body: AnyScoring, side: int, index: int) -> str:
    """Return the name of a text of a pair, as it was sent."""
    name = body.names()[side]
    return name if isinstance(getattr(body, name), str) else f"{name}[{index}]"


async def _similarities(
    state: ServerState, body: AnyScoring, pairs: Sequence[tuple[str, str]], request: Request
) -> tuple[list[float], EmbeddingUsage]:
    """Return the similarity of each pair's vectors; a text that occurs several times is embedded once. Raises
    InvalidRequest.
    """
    if body.instruct is not None:
        raise InvalidRequest(NO_INSTRUCTION, param="instruct")
    embedder = state.model.frontend.embedder
    has_cosine = embedder.similarity == "cosine"
    if body.use_activation is False:
        raise InvalidRequest("this model compares embeddings, and has no logits of pairs", param="use_activation")
    pairs = await asyncio.to_thread(lambda: list(_shortened(state.model, body, pairs)))
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    wanted = msgspec.convert({"input": texts, **body.options()}, EmbeddingRequest)
    try:
        groups = await embed(state, wanted, request)
    except InvalidRequest as error:
        if found := re.fullmatch(r"input(?:\[(\d+)\])?", error.param or ""):
            text = texts[int(found[1] or 0)]
            named = ((pair[side], _named(body, side, index)) for index, pair in enumerate(pairs) for side in (0, 1))
            rename(error, found[0], next(name for each, name in named if each == text))
        raise
    vectors = {}
    for text, group in zip(texts, groups, strict=True):
        assert group.embedding is not None, "a finished pooling request has a vector"
        vectors[text] = finish_embedding(group.embedding, embedder, normalize=True if has_cosine else None)
    return [embedder.similarity_of(vectors[first], vectors[second]) for first, second in pairs], usage_of(groups)
