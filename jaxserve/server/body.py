"""Bodies: JSON in, checked against a struct; a struct out as JSON."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.protocol.common import decode_body


async def read_json[T](request: Request, kind: type[T]) -> T:
    """The request's body as `kind`. Raises InvalidRequest, naming the field where there is one."""
    return decode_body(await request.body(), kind)


def json_response(body: msgspec.Struct) -> Response:
    """`body` with status 200."""
    return Response(msgspec.json.encode(body), media_type="application/json")
