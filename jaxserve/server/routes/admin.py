"""Operators' actions on a running engine. Off without an admin key, which `middleware` requires on these paths."""

import asyncio
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequest
from jaxserve.server.state import server_state
from jaxserve.server.wire.body import json_response
from jaxserve.server.wire.errors import refusal

# Paths of the API that this server does not support, whatever the key.
NOT_IMPLEMENTED = {
    "/v1/load_lora_adapter": "loading LoRA adapters",
    "/v1/unload_lora_adapter": "loading LoRA adapters",
    "/sleep": "putting the engine to sleep",
    "/wake_up": "putting the engine to sleep",
    "/update_weights": "changing the weights of a running engine",
}


class Done(msgspec.Struct):
    """The answer to a successful action."""

    status: Literal["ok"] = "ok"


async def reset_prefix_cache(request: Request) -> Response:
    """Drop every cached prefix; 409 while a request is running."""
    client = server_state(request.scope).model.frontend.client
    if not await asyncio.to_thread(client.reset_prefix_cache):
        return refusal(409, "the prefix cache cannot be reset while requests are running", kind="conflict_error")
    return json_response(Done())


async def start_profile(request: Request) -> Response:
    """Start a profile of the device, into the operator's directory."""
    state = server_state(request.scope)
    if state.profile_dir is None:
        raise InvalidRequest("there is no directory for profiles: start the server with --profile-dir")
    await asyncio.to_thread(state.model.frontend.client.start_profile, state.profile_dir)
    return json_response(Done())


async def stop_profile(request: Request) -> Response:
    """Stop the profile and write it."""
    await asyncio.to_thread(server_state(request.scope).model.frontend.client.stop_profile)
    return json_response(Done())


async def not_implemented(request: Request) -> Response:
    """Answer 501, naming the missing feature."""
    what = NOT_IMPLEMENTED[request.url.path]
    return refusal(501, f"{what} is not supported by this server", kind="not_implemented_error")


async def off(_request: Request) -> Response:
    """Answer 404: without an admin key all these routes are off."""
    return refusal(404, "admin routes are off: start the server with --admin-api-key or --admin-api-key-file")
