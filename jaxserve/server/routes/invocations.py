"""POST /invocations, SageMaker's only route: the body's fields decide which of our routes handles it."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequest
from jaxserve.server.body import read_json
from jaxserve.server.protocol.common import given_fields
from jaxserve.server.routes import chat, completions, embeddings

_ROUTES: dict[str, Callable[[Request], Awaitable[Response]]] = {
    "messages": chat.create,
    "prompt": completions.create,
    "input": embeddings.create,
}


async def create(request: Request) -> Response:
    """Answer a conversation, continue a prompt, or embed an input. Raises InvalidRequest for a body without any."""
    given = await read_json(request, given_fields)
    for name, route in _ROUTES.items():
        if bytes(given.get(name, b"null")) != b"null":
            return await route(request)
    raise InvalidRequest("give messages, prompt or input", param="messages")
