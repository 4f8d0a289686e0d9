"""GET /openapi.json: the surface as OpenAPI 3.1, from the same structs that check requests."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve import __version__
from jaxserve.server.errors import ErrorBody
from jaxserve.server.protocol.chat import ChatRequest, ChatResponse
from jaxserve.server.protocol.completions import CompletionRequest, CompletionResponse
from jaxserve.server.protocol.utility import (
    DetokenizeRequest,
    DetokenizeResponse,
    Health,
    TokenizeRequest,
    TokenizeResponse,
    Version,
)
from jaxserve.server.routes.models import Model, ModelList

# path -> (method, summary, body or None, answer)
_OPERATIONS: dict[str, tuple[str, str, type | None, type]] = {
    "/v1/completions": ("post", "Continue texts or token ids", CompletionRequest, CompletionResponse),
    "/v1/chat/completions": ("post", "Answer a conversation", ChatRequest, ChatResponse),
    "/v1/models": ("get", "The served models", None, ModelList),
    "/v1/models/{model}": ("get", "One served model", None, Model),
    "/tokenize": ("post", "Token ids of a prompt or a conversation", TokenizeRequest, TokenizeResponse),
    "/detokenize": ("post", "Text of token ids", DetokenizeRequest, DetokenizeResponse),
    "/health": ("get", "Whether new requests are taken", None, Health),
    "/live": ("get", "Whether the process answers", None, Health),
    "/version": ("get", "The version of jaxserve", None, Version),
}


async def show(_request: Request) -> Response:
    """The document."""
    return Response(msgspec.json.encode(document()), media_type="application/json")


def document() -> dict[str, Any]:
    """OpenAPI 3.1 of all routes with a JSON body."""
    bodies = [kind for _, _, body, answer in _OPERATIONS.values() for kind in (body, answer) if kind is not None]
    schemas, components = msgspec.json.schema_components(
        [*bodies, ErrorBody], ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip([*bodies, ErrorBody], schemas, strict=True))
    paths = {}
    for path, (method, summary, body, answer) in _OPERATIONS.items():
        operation: dict[str, Any] = {
            "summary": summary,
            "responses": {
                "200": {"description": "OK", "content": _json_content(schema_of[answer])},
                "default": {"description": "Error", "content": _json_content(schema_of[ErrorBody])},
            },
        }
        if body is not None:
            operation["requestBody"] = {"required": True, "content": _json_content(schema_of[body])}
        if "{model}" in path:
            operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths[path] = {method: operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _json_content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
