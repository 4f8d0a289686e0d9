"""Check an answer's constraint before its prompt is processed, in the pool of processes that compile grammars."""

import asyncio
import concurrent.futures
import json
from collections.abc import Mapping, Sequence

from starlette.types import Receive

from jaxserve.errors import InvalidRequest, QueueFull
from jaxserve.request import StructuredOutputs
from jaxserve.server.protocol.structured import blame
from jaxserve.server.state import ServerState
from jaxserve.server.streaming import while_wanted
from jaxserve.server.syntaxes.tool import Tool
from jaxserve.structured.grammar import JsonOptions
from jaxserve.structured.pool import JOB_SECONDS

QUEUE_SECONDS = 10.0
"""Maximum seconds that a grammar waits for those before it."""


async def answer_grammar(
    state: ServerState, constraint: StructuredOutputs, *, field: str | None, is_strict: bool, receive: Receive
) -> str:
    """Return the grammar text of a constraint, which is the request's `field`. If it `is_strict`, all of its schema has
    to be followed.

    Raises InvalidRequest, naming the field, for what cannot be followed; QueueFull when its turn does not come; and as
    `while_wanted` does when the result is no longer needed.
    """
    try:
        made = state.frontend.grammars.answer(constraint, is_closed=state.closes_objects, is_strict=is_strict)
        return await _made(state, made, receive)
    except InvalidRequest as error:
        blame(error, field)
        raise


async def with_checked_parameters(
    state: ServerState, tools: Sequence[Tool], *, params: Mapping[str, str], options: JsonOptions, receive: Receive
) -> list[Tool]:
    """Return the tools, with the parameters of those in `params` rewritten so that a grammar can follow them.

    `params` maps names of tools to the fields of their parameters. Raises as `answer_grammar` does.
    """
    if not params:
        return list(tools)
    schemas = [(params[tool.name], tool.parameters, tool.is_strict) for tool in tools if tool.name in params]
    made = iter(json.loads(await _made(state, state.frontend.grammars.arguments(schemas, options=options), receive)))
    return [tool._replace(parameters=next(made)) if tool.name in params else tool for tool in tools]


async def _made(state: ServerState, future: "concurrent.futures.Future[str]", receive: Receive) -> str:
    """Return the future's result. If the client leaves, the job is removed from the queue."""
    if future.done():
        return future.result()
    return await while_wanted(_in_time(future), receive=receive, stopping=state.stopping)


async def _in_time(future: "concurrent.futures.Future[str]") -> str:
    try:
        async with asyncio.timeout(QUEUE_SECONDS + JOB_SECONDS):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        raise QueueFull("too many grammars are being compiled", retry_after=JOB_SECONDS) from None
