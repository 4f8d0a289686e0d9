"""GET /, its files, and what it asks for: a page to chat with the model, and to watch the engine at work.

The page is static, self-contained, and asks for the API key itself.
"""

import hashlib
import pathlib

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.state import server_state
from jaxserve.server.wire.body import json_response

_FOLDER = pathlib.Path(__file__).resolve().parents[1] / "static"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = {
    f"/static/{path.relative_to(_FOLDER).as_posix()}": path
    for path in sorted(_FOLDER.rglob("*"))
    if path.suffix in _MEDIA_TYPES
}
PAGE = "/"
FILES = frozenset({PAGE, *_FILES})
"""Paths that are answered without a key, as their content is public."""

_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


async def show(request: Request) -> Response:
    """Return the page, or a file of it."""
    path = _FILES["/static/index.html" if request.url.path == PAGE else request.url.path]
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = _HEADERS | {"etag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=_MEDIA_TYPES[path.suffix], headers=headers)


async def engine_state(request: Request) -> Response:
    """Return the engine's current state. Raises EngineDead."""
    return json_response(await server_state(request.scope).engine_view.state())
