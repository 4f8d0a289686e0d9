"""GET /v1/models and /v1/models/{id}: the served models, with the fields of OpenAI's and of Anthropic's API."""

import datetime
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.generation.served_model import ServedModel
from jaxserve.server.state import server_state
from jaxserve.server.wire.body import json_response


class Model(msgspec.Struct, kw_only=True):
    """One served model. `root` is where it was found; `max_model_len` the context length in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxserve"
    root: str
    max_model_len: int
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelList(msgspec.Struct):
    """All served models, on one page."""

    data: list[Model]
    object: Literal["list"] = "list"
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


async def index(request: Request) -> Response:
    """Answer with the served model, once under each of its names."""
    state = server_state(request.scope)
    names = state.model.names
    models = [_model(state.model, name) for name in names]
    return json_response(ModelList(models, first_id=names[0], last_id=names[-1]))


async def show(request: Request) -> Response:
    """Answer with one model by its name. Raises ModelNotFound."""
    state, name = server_state(request.scope), request.path_params["model"]
    state.model.check_name(name)
    return json_response(_model(state.model, name))


def _model(model: ServedModel, name: str) -> Model:
    info = model.frontend.client.info
    created = datetime.datetime.fromtimestamp(model.created, datetime.UTC)
    return Model(
        id=name,
        created=model.created,
        root=model.frontend.model,
        max_model_len=info.max_model_len,
        display_name=name,
        created_at=created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=info.max_model_len,
        max_tokens=info.max_model_len,
    )
