"""The first step of a route: a body that passes the table of fields, for a model that is served."""

import uuid

import msgspec
from starlette.requests import Request

from jaxserve.server.body import read_json
from jaxserve.server.protocol.common import (
    AnswerRequest,
    GenerationRequest,
    RequestBody,
    StreamOptions,
    decode_request,
)
from jaxserve.server.protocol.decoding import decoded
from jaxserve.server.protocol.names import UnknownName, unknown_names
from jaxserve.server.state import ServerState


async def read_request[T: RequestBody](state: ServerState, request: Request, kind: type[T]) -> T:
    """Return the body as `kind`. Raises InvalidRequest, naming the field, and ModelNotFound."""
    body, unknown = await read_json(request, lambda content: decode_request(content, kind))
    for each in unknown:
        state.unknown_fields.count(each, route=kind.route)
    state.check_model(body.model)
    _set_defaults(state, body)
    return body


def _set_defaults(state: ServerState, body: RequestBody) -> None:
    """Set fields as the server's options say."""
    if isinstance(body, AnswerRequest) and body.return_tokens_as_token_ids is None and state.shows_token_ids:
        body.return_tokens_as_token_ids = True
    if isinstance(body, GenerationRequest) and body.stream and state.forces_usage:
        body.stream_options = body.stream_options or StreamOptions()
        body.stream_options.include_usage = True


async def read_struct[T: msgspec.Struct](state: ServerState, request: Request, kind: type[T], *, route: str) -> T:
    """Return a body that is not in the table of fields; its field `model` is checked.

    Raises InvalidRequest, naming the field, and ModelNotFound.
    """

    def read(content: bytes) -> tuple[T, list[UnknownName]]:
        return decoded(content, kind), unknown_names(content, kind)

    body, unknown = await read_json(request, read)
    for each in unknown:
        state.unknown_fields.count(each, route=route)
    state.check_model(getattr(body, "model", None))
    return body


def unique(answer_id: str) -> str:
    """Return the engine's id for the request behind an answer: clients may send the same id twice.

    The playground finds the answer's id in it again (`answerId` in static/dom.js).
    """
    return f"{answer_id}.{uuid.uuid4().hex}"
