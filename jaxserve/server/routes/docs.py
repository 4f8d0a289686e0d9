"""GET /docs: a page to try out the API, by Swagger UI, whose files come with a Python package."""

import importlib.util
import pathlib

from starlette.requests import Request
from starlette.responses import Response

_PACKAGE = importlib.util.find_spec("swagger_ui")
assert _PACKAGE is not None
assert _PACKAGE.origin is not None
_FOLDER = pathlib.Path(_PACKAGE.origin).parent / "static"
_OURS = pathlib.Path(__file__).resolve().parents[1] / "static"
PAGE = "/docs"
_FILES = {
    PAGE: (_OURS / "docs.html", "text/html"),
    "/docs/docs.js": (_OURS / "docs.js", "text/javascript"),
    "/docs/swagger-ui.css": (_FOLDER / "swagger-ui.css", "text/css"),
    "/docs/swagger-ui-bundle.js": (_FOLDER / "swagger-ui-bundle.js", "text/javascript"),
}
FILES = frozenset(_FILES)
"""Paths that are answered without a key, as their content is public. The document they show is not."""

_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


async def show(request: Request) -> Response:
    """Return the page, or a file of it."""
    path, media_type = _FILES[request.url.path]
    return Response(path.read_bytes(), media_type=media_type, headers=_HEADERS)
