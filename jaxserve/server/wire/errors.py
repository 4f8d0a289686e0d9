"""Every refusal and failure in the shape that the clients of its path read, whatever raised it: Anthropic's at
/v1/messages and below, OpenAI's elsewhere.
"""

import logging
import math
import re
from collections.abc import Mapping
from typing import Literal, override

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.errors import InvalidRequest, JaxserveError, QueueFull, RequestFailed, Unavailable

logger = logging.getLogger(__name__)

_HTTP_TYPES = {401: "authentication_error", 404: "not_found_error", 503: Unavailable.type}
_HTTP_CODES = {401: "invalid_api_key"}
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_MESSAGES_PATH = re.compile(r"/v1/messages(/|$)")
"""Found in a path, which may begin with the root path of a proxy."""


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong; `param` names the field of the request, `code` is machine-readable."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class MessagesErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong, in Anthropic's shape; `param` names the field of the request."""

    type: str
    message: str
    param: str | None = None


class MessagesErrorBody(msgspec.Struct, kw_only=True):
    """The body of every answer at /v1/messages that is not a success. `request_id` is null for a request that was
    refused before it got an id.
    """

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str | None


class ErrorResponse(Response):
    """An error, encoded in the shape of the path that it answers."""

    def __init__(self, status: int, body: ErrorBody, headers: Mapping[str, str] | None = None):
        super().__init__(b"", status, headers, media_type="application/json")
        self._error = body

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the error."""
        request_id = scope.get("request_id")
        self.body = encode_error(self.status_code, self._error, path=scope["path"], request_id=request_id)
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def encode_error(status: int, body: ErrorBody, *, path: str, request_id: str | None = None) -> bytes:
    """Encode `body` as JSON, in the shape that clients of `path` read."""
    if _MESSAGES_PATH.search(path) is None:
        return msgspec.json.encode(body)
    kind = _MESSAGES_TYPES.get(status, "invalid_request_error")
    detail = MessagesErrorDetail(type=kind, message=body.error.message, param=body.error.param)
    return msgspec.json.encode(MessagesErrorBody(error=detail, request_id=request_id))


def error_body(error: BaseException) -> ErrorBody:
    """Return what a client may know about `error`: everything about a refusal, nothing about a bug of ours."""
    if isinstance(error, InvalidRequest):
        detail = ErrorDetail(message=error.message, type=error.type, param=error.param, code=error.code)
    elif isinstance(error, Unavailable) and not isinstance(error, QueueFull):
        detail = ErrorDetail(message="the server cannot take requests now", type=error.type, code=error.code)
    elif isinstance(error, QueueFull | RequestFailed):
        detail = ErrorDetail(message=str(error), type=error.type, code=error.code)
    else:
        detail = ErrorDetail(message="internal server error", type=JaxserveError.type, code=JaxserveError.code)
    return ErrorBody(detail)


def refusal(
    status: int, message: str, *, kind: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the response for a request that did not reach a route."""
    kind = kind or _HTTP_TYPES.get(status, "invalid_request_error")
    return ErrorResponse(
        status, ErrorBody(ErrorDetail(message=message, type=kind, code=_HTTP_CODES.get(status))), headers
    )


async def on_jaxserve_error(_request: Request, error: Exception) -> Response:
    """Answer an exception of our own with the status it carries."""
    assert isinstance(error, JaxserveError)
    headers = {}
    if isinstance(error, QueueFull):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 500:
        logger.error("a request failed: %s", error)
    return ErrorResponse(error.status, error_body(error), headers)


async def on_recursion_error(_request: Request, _error: Exception) -> Response:
    """Answer a body whose values are nested deeper than Python's stack."""
    return refusal(400, "the request body is nested too deeply")


async def on_http_exception(_request: Request, error: Exception) -> Response:
    """Answer what Starlette itself refuses: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    return refusal(error.status_code, error.detail, headers=error.headers)


async def on_store_error(_request: Request, error: Exception) -> Response:
    """Answer a request that needs the store of responses when the disk is full or cannot be read."""
    logger.error("the store of responses has failed: %s", error)
    return refusal(503, "responses cannot be stored now")


async def on_disconnect(_request: Request, _error: Exception) -> Response:
    """Return status 499, which proxies log for it; the client has gone and reads nothing."""
    return Response(status_code=499)
