"""The first step of a route: a body that passes the table of fields, for a model that is served."""

from starlette.requests import Request

from jaxserve.server.body import read_json
from jaxserve.server.protocol.common import RequestBody, decode_request
from jaxserve.server.state import ServerState


async def read_request[T: RequestBody](state: ServerState, request: Request, kind: type[T]) -> T:
    """Return the body as `kind`. Raises InvalidRequest, naming the field, and ModelNotFound."""
    body, unknown = await read_json(request, lambda content: decode_request(content, kind))
    for each in unknown:
        state.unknown_fields.count(each, route=kind.route)
    state.check_model(body.model)
    return body
