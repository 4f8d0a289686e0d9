"""POST /v1/embeddings: texts or token ids in, a vector for each out."""

import base64
import itertools
import json
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.engine.embedding import Embedder, check_dimensions, finish_embedding
from jaxserve.engine.output import RequestGroup
from jaxserve.errors import InvalidRequest
from jaxserve.server.generation.running import while_wanted_by_client
from jaxserve.server.generation.served_model import ServedModel
from jaxserve.server.generation.template import render_chat
from jaxserve.server.protocol.common import rename
from jaxserve.server.protocol.completions import Prompt
from jaxserve.server.protocol.embeddings import (
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    EmbeddingUsage,
    check_embedding_request,
)
from jaxserve.server.state import ServerState, server_state
from jaxserve.server.wire.body import VECTORS_A_TURN, EncodedList, in_turns, json_response
from jaxserve.server.wire.streaming import while_wanted

MAX_METADATA_BYTES = 32 * 1024
"""Maximum bytes of the header that describes a body of bytes: what clients usually accept."""

_DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


async def create(request: Request) -> Response:
    """Return the vector of each input."""
    state = server_state(request.scope)
    body = await state.reader.request(request, EmbeddingRequest)
    groups = await embed(state, body, request)
    answer_id = f"embd-{body.request_id or request.scope['request_id']}"
    answer = EmbeddingResponse(
        id=answer_id, created=int(time.time()), data=[], model=state.model.name, usage=usage_of(groups)
    )
    if body.encoding_format in ("bytes", "bytes_only"):
        return _in_one_piece(body, answer, groups, state.model.frontend.embedder)
    data: Any = EncodedList()
    async for some in in_turns(list(enumerate(groups)), num_a_turn=VECTORS_A_TURN):
        data.extend([_embedding(body, index, group, state.model.frontend.embedder) for index, group in some])
    answer.data = data
    return json_response(answer)


async def embed(state: ServerState, body: EmbeddingRequest, request: Request) -> list[RequestGroup]:
    """Run the inputs of `body`, which `request` brought; the vector of each is in its group. Raises InvalidRequest."""
    groups = await state.runner.prepare(lambda gone: _prepare(state.model, body, gone), request)
    run = state.runner.run(groups, lambda _index, _delta: None)  # the vector is in the group
    await while_wanted(run, receive=request.receive, stopping=state.life.stopping)
    return groups


def usage_of(groups: Sequence[RequestGroup]) -> EmbeddingUsage:
    """Return the usage of inputs."""
    num_tokens = sum(len(group.prompt_token_ids) for group in groups)
    return EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)


def _prepare(model: ServedModel, body: EmbeddingRequest, gone: threading.Event) -> list[RequestGroup]:
    """Validate and tokenize the inputs. Raises InvalidRequest, naming fields as they were sent."""
    check_embedding_request(body)
    info = model.frontend.client.info
    check_dimensions(body.dimensions, size=model.frontend.embedder.size, allowed=info.embedding_dimensions)
    if body.messages is not None and model.frontend.embedder.lowercases:
        raise InvalidRequest(
            "this model reads lowercase text (do_lower_case), which a chat template is not: give input",
            param="messages",
        )
    if body.messages is None:
        prompts = body.prompts()
    else:
        prompts = [render_chat(model.frontend.tokenizer, model.message_style, body.conversation())]
    request_id = f"embd-{uuid.uuid4().hex}"
    groups = []
    for index, prompt in enumerate(while_wanted_by_client(prompts, gone)):
        try:
            groups.append(_prepare_one(model, body, prompt, request_id=f"{request_id}-{index}"))
        except InvalidRequest as error:
            name = "input" if body.messages is None else "messages"
            rename(error, "prompt", f"{name}[{index}]" if len(prompts) > 1 else name)
            raise
    return groups


def _prepare_one(model: ServedModel, body: EmbeddingRequest, prompt: Prompt, *, request_id: str) -> RequestGroup:
    if isinstance(prompt, str):
        model.check_text_length(prompt, may_exceed=body.truncate_prompt_tokens is not None)
    adds = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    return model.frontend.prepare_embedding(
        prompt,
        pooling=body.pooling or model.pooling,
        request_id=request_id,
        prompt_text=prompt if body.messages is not None and isinstance(prompt, str) else None,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        add_special_tokens=adds,  # a template writes its own
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
        prompt_name=body.prompt_name,
    )


def _vector(body: EmbeddingRequest, group: RequestGroup, embedder: Embedder) -> np.ndarray:
    """Return the vector of one input in the requested dtype."""
    assert group.embedding is not None, "a finished pooling request has a vector"
    vector = finish_embedding(group.embedding, embedder, dimensions=body.dimensions, normalize=body.is_normalized)
    with np.errstate(over="ignore"):  # values beyond the range of a narrow type become infinite
        return vector.astype(_DTYPES[body.embed_dtype or "float32"])


def _embedding(body: EmbeddingRequest, index: int, group: RequestGroup, embedder: Embedder) -> Embedding:
    if body.encoding_format == "base64":
        return Embedding(index=index, embedding=base64.b64encode(_encoded(body, group, embedder)).decode())
    return Embedding(index=index, embedding=_vector(body, group, embedder).astype(np.float32).tolist())


def _encoded(body: EmbeddingRequest, group: RequestGroup, embedder: Embedder) -> bytes:
    vector = _vector(body, group, embedder)
    is_big = body.endianness == "big" or (body.endianness == "native" and sys.byteorder == "big")
    return (vector if is_big == (sys.byteorder == "big") else vector.byteswap()).tobytes()


def _in_one_piece(
    body: EmbeddingRequest, answer: EmbeddingResponse, groups: Sequence[RequestGroup], embedder: Embedder
) -> Response:
    """Return all vectors concatenated.

    The header `metadata` describes, as JSON, where each of them is and the rest of the answer; with `bytes_only` it is
    omitted. Raises InvalidRequest if it would be too long for a header.
    """
    pieces = [_encoded(body, group, embedder) for group in groups]
    if body.encoding_format == "bytes_only":
        return Response(b"".join(pieces), media_type="application/octet-stream")
    ends = list(itertools.accumulate(map(len, pieces)))
    dtype = body.embed_dtype or "float32"
    data = [
        {
            "index": index,
            "embed_dtype": dtype,
            "endianness": body.endianness or "little",
            "start": end - len(piece),
            "end": end,
            "shape": [len(piece) // np.dtype(_DTYPES[dtype]).itemsize],
        }
        for index, (piece, end) in enumerate(zip(pieces, ends, strict=True))
    ]
    metadata = msgspec.json.encode(
        {"id": answer.id, "created": answer.created, "model": answer.model, "data": data, "usage": answer.usage}
    )
    if len(metadata) > MAX_METADATA_BYTES:
        raise InvalidRequest(
            f"input has {len(groups)} entries, too many for encoding_format 'bytes': write 'bytes_only' or 'base64'",
            param="input",
        )
    headers = {"metadata": json.dumps(json.loads(metadata))}  # escapes all but ASCII
    return Response(b"".join(pieces), headers=headers, media_type="application/octet-stream")
