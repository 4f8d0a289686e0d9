"""Bodies: JSON in, checked against a struct; a struct out as JSON."""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequest, UnsupportedMediaType
from jaxserve.server.protocol.common import decode_body

COUNTED_FROM = 2**20  # bytes of a body
MAX_PARTS = {b"{": 2**17, b"[": 2**17, b'":': 2**18, b",": 2**20}
"""What a larger body may have of each, texts included. Decoding takes its time by these, not by the bytes, and holds
the interpreter's lock: 8 MiB of text take 6 ms, as many bytes of lists would take half a second, in which nobody is
served; what these limits let pass takes 50 ms of processor time at the most.
"""


async def read_json[T](request: Request, kind: type[T]) -> T:
    """The request's body as `kind`. Raises InvalidRequest, naming the field where there is one.

    It must be called JSON: any web page may send what is not, without asking the server first.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType("send the body as 'Content-Type: application/json'")
    body = await request.body()
    return decode_body(body, kind) if len(body) <= COUNTED_FROM else await asyncio.to_thread(_decode_large, body, kind)


def _decode_large[T](body: bytes, kind: type[T]) -> T:
    for part, limit in MAX_PARTS.items():
        if body.count(part) > limit:
            raise InvalidRequest(f"the request body has more than {limit} {part.decode()!r}", code="too_many_parts")
    return decode_body(body, kind)


def json_response(body: msgspec.Struct) -> Response:
    """`body` with status 200."""
    return Response(msgspec.json.encode(body), media_type="application/json")
