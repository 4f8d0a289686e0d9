"""Routes for operators and evaluation tools: tokens, health, version, metrics. Only the engine's state waits for it."""

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve import __version__
from jaxserve.errors import InvalidRequest
from jaxserve.server.generation.served_model import ServedModel
from jaxserve.server.generation.template import render_chat
from jaxserve.server.protocol.utility import (
    DetokenizeRequest,
    DetokenizeResponse,
    Health,
    Load,
    TokenizeRequest,
    TokenizeResponse,
    Version,
    check_tokenize_request,
)
from jaxserve.server.state import server_state
from jaxserve.server.wire.body import EncodedList, json_response

VALUES_A_PIECE = 2**14  # token ids, which take 0.3 ms to encode
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def tokenize(request: Request) -> Response:
    """Return the token ids of a prompt or of a rendered chat."""
    state = server_state(request.scope)
    body = await state.reader.request(request, TokenizeRequest)
    check_tokenize_request(body)
    return json_response(await state.runner.prepare(lambda _: _tokenized(state.model, body), request))


def _tokenized(model: ServedModel, body: TokenizeRequest) -> TokenizeResponse:
    tokenizer = model.frontend.tokenizer
    if body.prompt is None:
        text = render_chat(tokenizer, model.message_style, body)
        model.check_text_length(text, may_exceed=True, param="messages")
        tokens = tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
    else:
        model.check_text_length(body.prompt, may_exceed=True)
        tokens = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=model.frontend.client.info.max_model_len,
        tokens=_as_encoded_list(tokens),
        token_strs=_as_encoded_list(tokens, tokenizer.vocabulary_token) if body.return_token_strs else None,
    )


def _as_encoded_list(values: list[int], shown: Callable[[int], object] | None = None) -> Any:
    """Encode values, converted by `shown`, into an EncodedList.

    This runs in a thread, piece by piece, so that the event loop gets its turn in between; it would encode a plain list
    at once.
    """
    pieces = EncodedList()
    for start in range(0, len(values), VALUES_A_PIECE):
        piece = values[start : start + VALUES_A_PIECE]
        pieces.extend(piece if shown is None else [shown(value) for value in piece])
    return pieces


async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    state = server_state(request.scope)
    body = await state.reader.struct(request, DetokenizeRequest, route="detokenize")
    return json_response(await state.runner.prepare(lambda _: _detokenized(state.model, body), request))


def _detokenized(model: ServedModel, body: DetokenizeRequest) -> DetokenizeResponse:
    tokenizer = model.frontend.tokenizer
    if not all(0 <= token <= tokenizer.max_token_id for token in body.tokens):
        raise InvalidRequest(f"tokens must be in [0, {tokenizer.max_token_id}]", param="tokens")
    return DetokenizeResponse(tokenizer.decode(body.tokens, skip_special_tokens=False))


async def health(request: Request) -> Response:
    """Answer 200 while new requests are accepted, else 503."""
    closed = server_state(request.scope).life.why_closed()
    body = Health("ok" if closed is None else str(closed))
    return Response(msgspec.json.encode(body), 200 if closed is None else 503, media_type="application/json")


async def load(request: Request) -> Response:
    """Return how many requests the engine runs or has waiting."""
    stats = server_state(request.scope).model.frontend.client.stats()
    return json_response(Load(stats.num_running + stats.num_waiting))


async def engine_state(request: Request) -> Response:
    """Return the engine's current state. Raises EngineDead."""
    return json_response(await server_state(request.scope).engine_view.state())


async def live(_request: Request) -> Response:
    """Answer 200 as long as the process responds."""
    return json_response(Health("ok"))


async def version(_request: Request) -> Response:
    """Return the version of jaxserve."""
    return json_response(Version(__version__))


async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus' text format."""
    return Response(server_state(request.scope).metrics.render(), headers={"content-type": _METRICS_TYPE})
