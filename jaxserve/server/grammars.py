"""What an answer must be, checked before its prompt is made: in the pool of processes that compile grammars."""

import asyncio
import concurrent.futures
import json
from collections.abc import Mapping, Sequence

from jaxserve.errors import InvalidRequest, QueueFull
from jaxserve.request import StructuredOutputs
from jaxserve.server.parsing.tools import Tool
from jaxserve.server.protocol.structured import blame
from jaxserve.server.state import ServerState
from jaxserve.structured.grammar import JsonOptions
from jaxserve.structured.pool import JOB_SECONDS

QUEUE_SECONDS = 10.0
"""How long a grammar may wait for those before it."""


async def answer_grammar(state: ServerState, wish: StructuredOutputs, *, field: str | None) -> str:
    """The grammar text of a wish, which is the request's `field`.

    Raises InvalidRequest, naming the field, for what cannot be followed; QueueFull when its turn does not come.
    """
    try:
        return await _made(state.frontend.grammars.answer(wish, is_closed=state.closes_objects))
    except InvalidRequest as error:
        blame(error, field)
        raise


async def with_checked_parameters(
    state: ServerState, tools: Sequence[Tool], *, params: Mapping[str, str], options: JsonOptions
) -> list[Tool]:
    """The tools. Those that `params` names, with the fields that their parameters are from, have such as a grammar can
    follow.

    Raises InvalidRequest, naming the field, and QueueFull.
    """
    if not params:
        return list(tools)
    schemas = [(params[tool.name], tool.parameters) for tool in tools if tool.name in params]
    made = iter(json.loads(await _made(state.frontend.grammars.arguments(schemas, options=options))))
    return [tool._replace(parameters=next(made)) if tool.name in params else tool for tool in tools]


async def _made(future: "concurrent.futures.Future[str]") -> str:
    """The result. Being cancelled, as when the client leaves, takes the grammar out of the queue."""
    try:
        async with asyncio.timeout(QUEUE_SECONDS + JOB_SECONDS):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        raise QueueFull("too many grammars are being compiled", retry_after=JOB_SECONDS) from None
