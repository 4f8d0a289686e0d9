"""GET /, its files, and what it asks for: a page to chat with the model, and to watch the engine at work.

The page is static, self-contained, and asks for the API key itself.
"""

import asyncio
import hashlib
import pathlib

import msgspec
from markdown_it import MarkdownIt
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.decoding import decoded
from jaxserve.errors import InvalidRequest
from jaxserve.server.state import server_state
from jaxserve.server.wire.body import json_response, read_json

_FOLDER = pathlib.Path(__file__).resolve().parents[1] / "static"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = {f"/static/{path.name}": path for path in sorted(_FOLDER.iterdir()) if path.suffix in _MEDIA_TYPES}
PAGE = "/"
FILES = frozenset({PAGE, *_FILES})
"""Paths that are answered without a key, as their content is public."""

MAX_MARKDOWN = 2**18
"""Maximum characters of a text that is rendered: a fifth of a second."""

_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("image")

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


class MarkdownRequest(msgspec.Struct):
    """The body of POST /playground/markdown."""

    text: str


class MarkdownResponse(msgspec.Struct):
    """The text as HTML. Markup that is in the text itself is escaped."""

    html: str


async def markdown(request: Request) -> Response:
    """Render Markdown, with tables and without raw HTML or images. Raises InvalidRequest."""
    body = await read_json(request, lambda content: decoded(content, MarkdownRequest))
    if len(body.text) > MAX_MARKDOWN:
        raise InvalidRequest(f"text has more than {MAX_MARKDOWN} characters", param="text")
    return json_response(MarkdownResponse(await asyncio.to_thread(_MARKDOWN.render, body.text)))


async def engine_state(request: Request) -> Response:
    """Return the engine's current state. Raises EngineDead."""
    return json_response(await server_state(request.scope).engine_view.state())
