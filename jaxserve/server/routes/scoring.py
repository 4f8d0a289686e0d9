"""POST /v1/score and /v1/rerank: how near texts are to each other, by the cosine of their embeddings. POST /classify:
probabilities of labels.
"""

import time
import uuid
from collections.abc import Sequence

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.engine.embedding import NO_HEAD, finish_embedding
from jaxserve.errors import InvalidRequest
from jaxserve.server.body import json_response
from jaxserve.server.protocol.embeddings import EmbeddingRequest, EmbeddingUsage
from jaxserve.server.protocol.scoring import (
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
    ScoringRequest,
)
from jaxserve.server.reading import read_struct
from jaxserve.server.routes.embeddings import embed
from jaxserve.server.state import ServerState, server_state


async def score(request: Request) -> Response:
    """Return the cosine of each pair of texts."""
    state = server_state(request.scope)
    body = await read_struct(state, request, ScoreRequest, route="score")
    scores, usage = await _cosines(state, body, body.pairs(), request)
    return json_response(
        ScoreResponse(
            id=f"score-{body.request_id or uuid.uuid4().hex}",
            created=int(time.time()),
            model=state.model,
            data=[Score(index=index, score=value) for index, value in enumerate(scores)],
            usage=usage,
        )
    )


async def rerank(request: Request) -> Response:
    """Return documents, the one nearest to the query first."""
    state = server_state(request.scope)
    body = await read_struct(state, request, RerankRequest, route="rerank")
    texts = body.texts()
    scores, usage = await _cosines(state, body, [(body.query, text) for text in texts], request)
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or None]
    is_shown = body.return_documents is not False
    results = [
        RankedDocument(
            index=index, document=Document(texts[index]) if is_shown else None, relevance_score=scores[index]
        )
        for index in order
    ]
    answer_id = f"rerank-{body.request_id or uuid.uuid4().hex}"
    return json_response(RerankResponse(id=answer_id, model=state.model, results=results, usage=usage))


async def classify(request: Request) -> Response:
    """Return the probabilities of the labels of each input, by the model's classification head."""
    state = server_state(request.scope)
    body = await read_struct(state, request, ClassifyRequest, route="classify")
    head = state.frontend.head
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
        probs = head.probs(finish_embedding(group.embedding, normalize=False))
        label = head.labels[max(range(len(probs)), key=probs.__getitem__)]
        data.append(Classification(index=index, label=label, probs=probs, num_classes=len(probs)))
    num_tokens = sum(len(group.prompt_token_ids) for group in groups)
    return json_response(
        ClassifyResponse(
            id=f"classify-{body.request_id or uuid.uuid4().hex}",
            created=int(time.time()),
            model=state.model,
            data=data,
            usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        )
    )


async def _cosines(
    state: ServerState, body: ScoringRequest, pairs: Sequence[tuple[str, str]], request: Request
) -> tuple[list[float], EmbeddingUsage]:
    """Return the cosine of each pair; a text that occurs several times is embedded once. Raises InvalidRequest."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    wanted = msgspec.convert({"input": texts, **body.options()}, EmbeddingRequest)
    try:
        groups = await embed(state, wanted, request)
    except InvalidRequest as error:
        if error.param is not None and error.param.startswith("input"):
            error.param = None  # the message says what is wrong with the text
        raise
    vectors = {}
    for text, group in zip(texts, groups, strict=True):
        assert group.embedding is not None, "a finished pooling request has a vector"
        vectors[text] = finish_embedding(group.embedding, dimensions=None, normalize=True)
    num_tokens = sum(len(group.prompt_token_ids) for group in groups)
    usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return [float(np.dot(vectors[first], vectors[second])) for first, second in pairs], usage
