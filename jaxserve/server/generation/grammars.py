"""Check an answer's constraint before its prompt is processed, in the pool of processes that compile grammars."""

import asyncio
import concurrent.futures
import dataclasses
import json
from collections.abc import Mapping, Sequence

from starlette.types import Receive

from jaxserve.answers.tools.tool import Tool
from jaxserve.errors import InvalidRequest, QueueFull
from jaxserve.sampling_params import StructuredOutputs
from jaxserve.server.protocol.structured import blame
from jaxserve.server.wire.streaming import while_wanted
from jaxserve.structured.grammar import JsonOptions
from jaxserve.structured.pool import JOB_SECONDS, GrammarPool

QUEUE_SECONDS = 10.0
"""Maximum seconds that a grammar waits for those before it."""


@dataclasses.dataclass(kw_only=True)
class Grammars:
    """Checks the constraints of a server's requests in the processes of `pool`, until `stopping` is set.

    `closes_objects`: default for schemas that name properties; if true, their objects have no others.
    """

    pool: GrammarPool
    closes_objects: bool
    stopping: asyncio.Event

    async def answer(
        self, constraint: StructuredOutputs, *, field: str | None, is_strict: bool, receive: Receive
    ) -> str:
        """Return the grammar text of a constraint, which is the request's `field`. If it `is_strict`, all of its schema
        has to be followed.

        Raises InvalidRequest, naming the field, for what cannot be followed; QueueFull when its turn does not come; and
        as `while_wanted` does when the result is no longer needed.
        """
        try:
            made = self.pool.answer(constraint, is_closed=self.closes_objects, is_strict=is_strict)
            return await self._made(made, receive)
        except InvalidRequest as error:
            blame(error, field)
            raise

    async def with_checked_parameters(
        self, tools: Sequence[Tool], *, params: Mapping[str, str], options: JsonOptions, receive: Receive
    ) -> list[Tool]:
        """Return the tools, with the parameters of those in `params` rewritten so that a grammar can follow them.

        `params` maps names of tools to the fields of their parameters. Raises as `answer` does.
        """
        if not params:
            return list(tools)
        schemas = [(params[tool.name], tool.parameters, tool.is_strict) for tool in tools if tool.name in params]
        made = iter(json.loads(await self._made(self.pool.arguments(schemas, options=options), receive)))
        return [tool._replace(parameters=next(made)) if tool.name in params else tool for tool in tools]

    async def _made(self, future: "concurrent.futures.Future[str]", receive: Receive) -> str:
        """Return the future's result. If the client leaves, the job is removed from the queue."""
        if future.done():
            return future.result()
        return await while_wanted(_in_time(future), receive=receive, stopping=self.stopping)


async def _in_time(future: "concurrent.futures.Future[str]") -> str:
    try:
        async with asyncio.timeout(QUEUE_SECONDS + JOB_SECONDS):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        raise QueueFull("too many grammars are being compiled", retry_after=JOB_SECONDS) from None
