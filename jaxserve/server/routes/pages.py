"""Static pages: GET / is the playground, to chat with the model and watch the engine at work; GET /docs tries out the
API by Swagger UI, whose files come with a Python package. Both ask for the API key themselves.
"""

import hashlib
import importlib.util
import pathlib

from starlette.requests import Request
from starlette.responses import Response

_FOLDER = pathlib.Path(__file__).resolve().parents[1] / "static"
_PACKAGE = importlib.util.find_spec("swagger_ui")
assert _PACKAGE is not None
assert _PACKAGE.origin is not None
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_DOCS = {
    "/docs": _FOLDER / "docs.html",
    "/docs/docs.js": _FOLDER / "docs.js",
    **{
        f"/docs/{name}": pathlib.Path(_PACKAGE.origin).parent / "static" / name
        for name in ("swagger-ui.css", "swagger-ui-bundle.js")
    },
}
_FILES = {
    "/": _FOLDER / "index.html",
    **{
        f"/static/{path.relative_to(_FOLDER).as_posix()}": path
        for path in sorted(_FOLDER.rglob("*"))
        if path.suffix in _MEDIA_TYPES
    },
    **_DOCS,
}
FILES = frozenset(_FILES)
OPEN_PATHS = FILES | {"/live", "/health", "/ping"}
"""Paths that are answered without a key: the content of files is public."""

_POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; "
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": f"{_POLICY}style-src 'self'; img-src 'self'",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_DOCS_HEADERS = {"content-security-policy": f"{_POLICY}style-src 'self' 'unsafe-inline'; img-src 'self' data:"}


async def show(request: Request) -> Response:
    """Return a page, or a file of one."""
    path = _FILES[request.url.path]
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = _HEADERS | (_DOCS_HEADERS if request.url.path in _DOCS else {}) | {"etag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=_MEDIA_TYPES[path.suffix], headers=headers)
