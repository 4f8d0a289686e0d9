"""Every refusal and failure as `{"error": {message, type, param, code}}`, whatever raised it."""

import logging
import math
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequest, JaxserveError, QueueFull, RequestFailed, Unavailable

logger = logging.getLogger(__name__)

_HTTP_TYPES = {401: "authentication_error", 404: "not_found_error", 503: Unavailable.type}
_HTTP_CODES = {401: "invalid_api_key"}


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong; `param` names the field of the request, `code` is machine-readable."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """The body of every answer that is not a success."""

    error: ErrorDetail


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


def error_response(status: int, body: ErrorBody, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with `body` as JSON."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def refusal(
    status: int, message: str, *, kind: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the response for a request that did not reach a route."""
    kind = kind or _HTTP_TYPES.get(status, "invalid_request_error")
    return error_response(
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
    return error_response(error.status, error_body(error), headers)


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
