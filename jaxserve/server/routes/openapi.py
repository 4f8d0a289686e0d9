"""GET /openapi.json: the API as OpenAPI 3.1, from the same structs that check requests."""

import functools
import re
from collections.abc import Mapping
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
from jaxserve.server.routes.admin import Done
from jaxserve.server.routes.models import Model, ModelList
from jaxserve.server.routes.open_paths import OPEN_PATHS
from jaxserve.server.wire.errors import ErrorBody, MessagesErrorBody


class _Operation(NamedTuple):
    """One method of one path. `streams`: with stream=true the answer is a stream of server-sent events."""

    method: str
    path: str
    summary: str
    body: type | None
    answer: type
    streams: bool = False
    is_admin: bool = False
    error: type = ErrorBody


_OPERATIONS = (
    _Operation("post", "/v1/completions", "Continue texts or token ids", CompletionRequest, CompletionResponse, True),
    _Operation("post", "/v1/chat/completions", "Answer a conversation", ChatRequest, ChatResponse, True),
    _Operation("post", "/v1/chat/completions/batch", "Answer several conversations", ChatBatchRequest, ChatResponse),
    _Operation("post", "/v1/embeddings", "Vectors of texts or token ids", EmbeddingRequest, EmbeddingResponse),
    _Operation("post", "/v1/responses", "Answer, and remember", ResponsesRequest, ResponseBody, True),
    _Operation(
        "post", "/invocations", "A chat, text, vectors or scores: what is sent", ChatRequest, ChatResponse, True
    ),
    _Operation("get", "/v1/responses/{response_id}", "A stored response", None, ResponseBody),
    _Operation("delete", "/v1/responses/{response_id}", "Forget a stored response", None, DeletedResponse),
    _Operation("post", "/v1/responses/{response_id}/cancel", "Stop one in the background", None, ResponseBody),
    _Operation("get", "/v1/responses/{response_id}/input_items", "What it was an answer to", None, ItemList),
    _Operation(
        "post",
        "/v1/messages",
        "Answer a conversation, as Anthropic's API does",
        MessagesRequest,
        MessagesResponse,
        streams=True,
        error=MessagesErrorBody,
    ),
    _Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation",
        CountRequest,
        TokenCount,
        error=MessagesErrorBody,
    ),
    _Operation("post", "/classify", "Probabilities of labels", ClassifyRequest, ClassifyResponse),
    *(
        _Operation("post", f"{prefix}/score", "How well texts fit each other", ScoreRequest, ScoreResponse)
        for prefix in ("", "/v1")
    ),
    *(
        _Operation("post", f"{prefix}/rerank", "Sort documents by a query", RerankRequest, RerankResponse)
        for prefix in ("", "/v1", "/v2")
    ),
    _Operation("get", "/v1/models", "The served models", None, ModelList),
    _Operation("get", "/v1/models/{model}", "One served model", None, Model),
    _Operation("post", "/tokenize", "Token ids of a prompt or a conversation", TokenizeRequest, TokenizeResponse),
    _Operation("post", "/detokenize", "Text of token ids", DetokenizeRequest, DetokenizeResponse),
    _Operation("get", "/health", "Whether new requests are taken", None, Health),
    *(_Operation(method, "/ping", "The same as /health", None, Health) for method in ("get", "post")),
    _Operation("get", "/load", "How many requests there are", None, Load),
    _Operation("get", "/live", "Whether the process answers", None, Health),
    _Operation("get", "/version", "The version of jaxserve", None, Version),
    _Operation("get", "/engine/state", "What the engine is doing", None, EngineState),
    _Operation("post", "/reset_prefix_cache", "Forget every cached prefix", None, Done, is_admin=True),
    _Operation("post", "/start_profile", "Record what the device does", None, Done, is_admin=True),
    _Operation("post", "/stop_profile", "Write what was recorded", None, Done, is_admin=True),
)


async def show(_request: Request) -> Response:
    """Return the document."""
    return Response(msgspec.json.encode(document()), media_type="application/json")


@functools.cache
def document() -> dict[str, Any]:
    """Build the OpenAPI 3.1 document of all routes with a JSON body."""
    bodies = [kind for operation in _OPERATIONS for kind in (operation.body, operation.answer) if kind is not None]
    errors = sorted({operation.error for operation in _OPERATIONS}, key=lambda kind: kind.__module__)
    schemas, components = msgspec.json.schema_components([*bodies, *errors], ref_template="#/components/schemas/{name}")
    schema_of = dict(zip([*bodies, *errors], schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation, schema_of)
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


def _describe(operation: _Operation, schema_of: Mapping[type, dict[str, Any]]) -> dict[str, Any]:
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
    names = re.findall(r"{(\w+)}", operation.path)
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return described
