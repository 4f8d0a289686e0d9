"""The routes of the API, and GET /openapi.json: the API as OpenAPI 3.1, from the structs that check requests."""

import functools
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve import __version__
from jaxserve.server.anthropic.protocol import CountRequest, MessagesRequest, MessagesResponse, TokenCount
from jaxserve.server.engine_view import EngineState
from jaxserve.server.protocol.chat import ChatBatchRequest, ChatRequest, ChatResponse
from jaxserve.server.protocol.completions import CompletionRequest, CompletionResponse
from jaxserve.server.protocol.embeddings import EmbeddingRequest, EmbeddingResponse
from jaxserve.server.protocol.responses import DeletedResponse, ItemList, ResponseBody, ResponsesRequest
from jaxserve.server.protocol.scoring import (
    ClassifyRequest,
    ClassifyResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from jaxserve.server.protocol.utility import (
    DetokenizeRequest,
    DetokenizeResponse,
    Health,
    Load,
    TokenizeRequest,
    TokenizeResponse,
    Version,
)
from jaxserve.server.routes import (
    admin,
    chat,
    chat_batch,
    completions,
    embeddings,
    invocations,
    messages,
    models,
    responses,
    scoring,
    utility,
)
from jaxserve.server.routes.models import Model, ModelList
from jaxserve.server.routes.pages import OPEN_PATHS
from jaxserve.server.wire.errors import ErrorBody, MessagesErrorBody


class Operation(NamedTuple):
    """One method of one path, which `run` answers. `streams`: with stream=true it is a stream of server-sent events."""

    method: str
    path: str
    run: Callable[[Request], Awaitable[Response]]
    summary: str
    body: type | None
    answer: type
    streams: bool = False
    error: type = ErrorBody
    is_admin: bool = False


def _post(path: str, run: Callable[[Request], Awaitable[Response]], summary: str, *kinds: Any) -> Operation:
    return Operation("POST", path, run, summary, *kinds)


def _get(path: str, run: Callable[[Request], Awaitable[Response]], summary: str, answer: type) -> Operation:
    return Operation("GET", path, run, summary, None, answer)


_STORED = "/v1/responses/{response_id}"
# fmt: off
OPERATIONS = (
    _post("/v1/completions", completions.create, "Continue texts or token ids", CompletionRequest, CompletionResponse,
        True),
    _post("/v1/chat/completions", chat.create, "Answer a conversation", ChatRequest, ChatResponse, True),
    _post("/v1/chat/completions/batch", chat_batch.create, "Answer several conversations", ChatBatchRequest,
        ChatResponse),
    _post("/v1/embeddings", embeddings.create, "Vectors of texts or token ids", EmbeddingRequest, EmbeddingResponse),
    _post("/v1/responses", responses.create, "Answer, and remember", ResponsesRequest, ResponseBody, True),
    _get(_STORED, responses.show, "A stored response", ResponseBody),
    Operation("DELETE", _STORED, responses.delete, "Forget a stored response", None, DeletedResponse),
    _post(f"{_STORED}/cancel", responses.cancel, "Stop one in the background", None, ResponseBody),
    _get(f"{_STORED}/input_items", responses.show_input, "What it was an answer to", ItemList),
    _post("/invocations", invocations.create, "A chat, text, vectors or scores: what is sent", ChatRequest,
        ChatResponse, True),
    _post("/v1/messages", messages.create, "Answer a conversation, as Anthropic's API does", MessagesRequest,
        MessagesResponse, True, MessagesErrorBody),
    _post("/v1/messages/count_tokens", messages.count_tokens, "Count the tokens of a conversation", CountRequest,
        TokenCount, False, MessagesErrorBody),
    _post("/classify", scoring.classify, "Probabilities of labels", ClassifyRequest, ClassifyResponse),
    *(
        _post(f"{prefix}/score", scoring.score, "How well texts fit each other", ScoreRequest, ScoreResponse)
        for prefix in ("", "/v1")
    ),
    *(
        _post(f"{prefix}/rerank", scoring.rerank, "Sort documents by a query", RerankRequest, RerankResponse)
        for prefix in ("", "/v1", "/v2")
    ),
    _get("/v1/models", models.index, "The served models", ModelList),
    _get("/v1/models/{model:path}", models.show, "One served model", Model),
    _post("/tokenize", utility.tokenize, "Token ids of a prompt or a conversation", TokenizeRequest, TokenizeResponse),
    _post("/detokenize", utility.detokenize, "Text of token ids", DetokenizeRequest, DetokenizeResponse),
    _get("/health", utility.health, "Whether new requests are taken", Health),
    *(Operation(method, "/ping", utility.health, "The same as /health", None, Health) for method in ("GET", "POST")),
    _get("/load", utility.load, "How many requests there are", Load),
    _get("/live", utility.live, "Whether the process answers", Health),
    _get("/version", utility.version, "The version of jaxserve", Version),
    _get("/engine/state", utility.engine_state, "What the engine is doing", EngineState),
    *(
        Operation("POST", path, run, summary, None, admin.Done, is_admin=True)
        for path, run, summary in (
            ("/reset_prefix_cache", admin.reset_prefix_cache, "Forget every cached prefix"),
            ("/start_profile", admin.start_profile, "Record what the device does"),
            ("/stop_profile", admin.stop_profile, "Write what was recorded"),
        )
    ),
)
# fmt: on
"""All routes with a JSON body or answer."""


async def show(_request: Request) -> Response:
    """Return the document."""
    return Response(msgspec.json.encode(document()), media_type="application/json")


@functools.cache
def document() -> dict[str, Any]:
    """Build the OpenAPI 3.1 document of all routes with a JSON body."""
    bodies = [kind for operation in OPERATIONS for kind in (operation.body, operation.answer) if kind is not None]
    errors = sorted({operation.error for operation in OPERATIONS}, key=lambda kind: kind.__module__)
    schemas, components = msgspec.json.schema_components([*bodies, *errors], ref_template="#/components/schemas/{name}")
    schema_of = dict(zip([*bodies, *errors], schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        path = operation.path.replace(":path", "")
        paths.setdefault(path, {})[operation.method.lower()] = _describe(operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "admin": {"type": "http", "scheme": "bearer"},
            },
        },
    }


def _describe(operation: Operation, schema_of: Mapping[type, dict[str, Any]]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema_of[operation.answer]}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "OK", "content": content},
            "default": {
                "description": "Error",
                "content": {"application/json": {"schema": schema_of[operation.error]}},
            },
        },
    }
    if operation.path not in OPEN_PATHS:
        described["security"] = [{"admin" if operation.is_admin else "key": []}]
    if operation.body is not None:
        body_content = {"application/json": {"schema": schema_of[operation.body]}}
        described["requestBody"] = {"required": True, "content": body_content}
    names = re.findall(r"{(\w+)", operation.path)
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return described
