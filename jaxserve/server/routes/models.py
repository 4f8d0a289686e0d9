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
    """Return the served models."""
    return json_response(ModelList([_model(server_state(request.scope))]))


async def show(request: Request) -> Response:
    """Return one model by its name. Raises ModelNotFound."""
    state = server_state(request.scope)
    state.check_model(request.path_params["model"])
    return json_response(_model(state))


def _model(state: ServerState) -> Model:
    info = state.frontend.client.info
    return Model(id=state.model, created=state.created, root=info.model, max_model_len=info.max_model_len)
