"""POST /invocations, SageMaker's only route: the body's fields decide which of our routes handles it."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequest
from jaxserve.server.protocol.common import given_fields
from jaxserve.server.routes import chat, completions, embeddings, scoring
from jaxserve.server.state import server_state
from jaxserve.server.wire.body import read_json

_ROUTES: dict[str, Callable[[Request], Awaitable[Response]]] = {
    "messages": chat.create,
    "prompt": completions.create,
    "input": embeddings.create,
    "query": scoring.rerank,
    **dict.fromkeys(("text_1", "text_2", "queries", "data_1", "data_2"), scoring.score),
}


async def create(request: Request) -> Response:
    """Answer a conversation, continue a prompt, embed or classify an input, or rank and score texts.

    Raises InvalidRequest for a body without any of these.
    """
    given = await read_json(request, given_fields)
    for name, route in _ROUTES.items():
        if bytes(given.get(name, b"null")) != b"null":
            is_classified = name == "input" and server_state(request.scope).model.frontend.head is not None
            return await (scoring.classify if is_classified else route)(request)
    raise InvalidRequest("give messages, prompt, input, query or text_1", param="messages")
