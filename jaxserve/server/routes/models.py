"""GET /v1/models and /v1/models/{id}: the served models."""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.body import json_response
from jaxserve.server.state import ServerState, server_state


class Model(msgspec.Struct, kw_only=True):
    """One served model. `root` is what was loaded; `max_model_len` the context length in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxserve"
    root: str
    max_model_len: int


class ModelList(msgspec.Struct):
    """All served models."""

    data: list[Model]
    object: Literal["list"] = "list"


async def index(request: Request) -> Response:
    """Answer with the served model, once under each of its names."""
    state = server_state(request.scope)
    return json_response(ModelList([_model(state, name) for name in state.names]))


async def show(request: Request) -> Response:
    """Answer with one model by its name. Raises ModelNotFound."""
    state, name = server_state(request.scope), request.path_params["model"]
    state.check_model(name)
    return json_response(_model(state, name))


def _model(state: ServerState, name: str) -> Model:
    info = state.frontend.client.info
    return Model(id=name, created=state.created, root=info.model, max_model_len=info.max_model_len)
