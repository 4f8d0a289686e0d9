"""The first step of a route: a body that passes the table of fields, for a model that is served."""

import dataclasses
import uuid
from collections.abc import Callable

import msgspec
from starlette.requests import Request

from jaxserve.decoding import decoded
from jaxserve.server.generation.unknown_fields import UnknownFields
from jaxserve.server.protocol.common import AnswerRequest, GenerationRequest, RequestBody, StreamOptions, decode_request
from jaxserve.server.protocol.names import UnknownName, unknown_names
from jaxserve.server.wire.body import read_json


@dataclasses.dataclass(kw_only=True)
class BodyReader:
    """Reads the bodies of a server's requests."""

    check_model: Callable[[str | None], None]
    """Raises ModelNotFound for a name that is not served."""
    unknown_fields: UnknownFields
    forces_usage: bool = False
    """True if streams end with their usage, whether the request asks for it or not."""
    shows_token_ids: bool = False
    """Default of `return_tokens_as_token_ids`."""

    async def request[T: RequestBody](self, request: Request, kind: type[T]) -> T:
        """Return the body as `kind`. Raises InvalidRequest, naming the field, and ModelNotFound."""
        body = await self._read(request, lambda content: decode_request(content, kind), route=kind.route)
        if isinstance(body, AnswerRequest) and body.return_tokens_as_token_ids is None and self.shows_token_ids:
            body.return_tokens_as_token_ids = True
        if isinstance(body, GenerationRequest) and body.stream and self.forces_usage:
            body.stream_options = body.stream_options or StreamOptions()
            body.stream_options.include_usage = True
        return body

    async def struct[T: msgspec.Struct](self, request: Request, kind: type[T], *, route: str) -> T:
        """Return a body that is not in the table of fields. Raises as `request` does."""
        return await self._read(
            request, lambda content: (decoded(content, kind), unknown_names(content, kind)), route=route
        )

    async def _read[T](
        self, request: Request, read: Callable[[bytes], tuple[T, list[UnknownName]]], *, route: str
    ) -> T:
        body, unknown = await read_json(request, read)
        for each in unknown:
            self.unknown_fields.count(each, route=route)
        self.check_model(getattr(body, "model", None))
        return body


def unique(answer_id: str) -> str:
    """Return the engine's id for the request behind an answer: clients may send the same id twice.

    The playground finds the answer's id in it again (`answerId` in static/dom.js).
    """
    return f"{answer_id}.{uuid.uuid4().hex}"
