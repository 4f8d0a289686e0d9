"""POST /v1/embeddings: texts or token ids in, a vector for each out."""

import base64
import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.engine.embedding import check_dimensions, finish_embedding
from jaxserve.engine.output import RequestGroup
from jaxserve.errors import InvalidRequest
from jaxserve.request import RequestOutput
from jaxserve.server import generation
from jaxserve.server.body import VECTORS_A_TURN, EncodedList, in_turns, json_response
from jaxserve.server.protocol.common import rename
from jaxserve.server.protocol.embeddings import Embedding, EmbeddingRequest, EmbeddingResponse, EmbeddingUsage
from jaxserve.server.reading import read_request
from jaxserve.server.state import ServerState, server_state
from jaxserve.server.streaming import while_wanted


async def create(request: Request) -> Response:
    """Read each input and return its vector."""
    state = server_state(request.scope)
    body = await read_request(state, request, EmbeddingRequest)
    size = len(await request.body())
    groups = await generation.prepare(state, lambda: _prepare(state, body), size=size, receive=request.receive)
    await while_wanted(generation.run(state, groups, _ignore), receive=request.receive, stopping=state.stopping)
    num_tokens = sum(len(group.prompt_token_ids) for group in groups)
    data: Any = EncodedList()
    async for some in in_turns(list(enumerate(groups)), num_a_turn=VECTORS_A_TURN):
        data.extend([_embedding(body, index, group) for index, group in some])
    return json_response(
        EmbeddingResponse(
            id=f"embd-{body.request_id or request.scope['request_id']}",
            created=int(time.time()),
            data=data,
            model=state.model,
            usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        )
    )


def _prepare(state: ServerState, body: EmbeddingRequest) -> list[RequestGroup]:
    """Validated, tokenized inputs. Raises InvalidRequest."""
    prompts = body.prompts()
    check_dimensions(body.dimensions, state.frontend.client.info.hidden_size)
    request_id = f"embd-{uuid.uuid4().hex}"
    groups = []
    for index, prompt in enumerate(prompts):
        try:
            if isinstance(prompt, str):
                generation.check_text_length(prompt, state, may_exceed=body.truncate_prompt_tokens is not None)
            group = state.frontend.prepare_embedding(
                prompt,
                pooling=body.pooling or state.pooling,
                request_id=f"{request_id}-{index}",
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                add_special_tokens=body.add_special_tokens is not False,
                truncate_prompt_tokens=body.truncate_prompt_tokens,
                truncation_side=body.truncation_side or "left",
            )
        except InvalidRequest as error:
            rename(error, "prompt", "input")
            raise
        groups.append(group)
    return groups


def _embedding(body: EmbeddingRequest, index: int, group: RequestGroup) -> Embedding:
    assert group.embedding is not None, "a finished pooling request has a vector"
    vector = finish_embedding(group.embedding, dimensions=body.dimensions, normalize=body.normalize is not False)
    if body.encoding_format == "base64":
        return Embedding(index=index, embedding=base64.b64encode(vector.astype("<f4").tobytes()).decode())
    return Embedding(index=index, embedding=vector.tolist())


def _ignore(_index: int, _delta: RequestOutput) -> None:
    """The vector is in the group."""
