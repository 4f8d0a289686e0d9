"""A Ray Serve application: replicas of an engine with all routes of `jaxserve serve`, behind a router that knows which
replica has which prompts in its prefix cache.

    pip install 'jaxserve[ray]'
    serve run jaxserve.ray_serve:app model=path/to/model max_replicas=4 num_gpus=1

The door is a thin deployment: it reads a request's body, and hands the request to a replica whose ASGI application
answers it. Ray starts replicas when each has more than `target_ongoing_requests` requests, and ends them when it has
fewer. The requests that a replica had when it died fail, all others are answered.
"""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray import serve  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]
from ray.serve.config import RequestRouterConfig  # pyright: ignore[reportMissingImports]
from ray.serve.request_router import RequestRouter  # pyright: ignore[reportMissingImports]

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine.router import PrefixRouter, prompt_bytes, prompt_chunks
from jaxserve.errors import ConfigError
from jaxserve.flags import value_of
from jaxserve.server.wire.errors import refusal

logger = logging.getLogger(__name__)

MAX_REPLICAS = 64
"""Largest `max_replicas`."""

BYTES_OF_CACHE = 2**22
"""Bytes of prompts that a replica's prefix cache is taken to hold."""

MAX_MESSAGES = 16
"""Parts of an answer, up to 256 KiB each, that wait for its reader; then the application waits, as it does for a
connection, and limits what it holds itself.
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """What `app` is given besides options of an engine and of a server."""

    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: int = 64
    max_ongoing_requests: int = 1024
    num_gpus: float = 0
    num_cpus: float = 1

    def __post_init__(self) -> None:
        """Raise ConfigError for numbers of replicas that are not there."""
        if not 1 <= self.min_replicas <= self.max_replicas <= MAX_REPLICAS:
            raise ConfigError(
                f"min_replicas and max_replicas must be in [1, {MAX_REPLICAS}], in this order, got {self.min_replicas} "
                f"and {self.max_replicas}"
            )


class Engine:
    """A replica: an engine in this process, and the application that answers with it."""

    def __init__(self, engine: dict[str, Any], server: dict[str, Any]):
        """Load the model. Raises StartupError."""
        from jaxserve.answers.choosing.served_tokenizer import served_tokenizer
        from jaxserve.engine.frontend import Frontend, sampling_defaults
        from jaxserve.engine.local import LocalEngineClient
        from jaxserve.loading.builtin import resolve_names
        from jaxserve.server.app import create_app
        from jaxserve.server.process.lifecycle import make_state
        from jaxserve.server.state import lifespan_state
        from jaxserve.tokenizer import Tokenizer

        config = EngineConfig(**engine)
        options: dict[str, Any] = {"served_model_name": (config.model,)} | server
        server_config = ServerConfig(**options)
        config = resolve_names(config)
        tokenizer = served_tokenizer(Tokenizer.load(config.tokenizer or config.model), server_config)
        self._client = LocalEngineClient.start(config, progress=False, owns_process=True)
        frontend = Frontend(self._client, tokenizer, default_sampling=sampling_defaults(config.model), seed=config.seed)
        state = make_state(frontend, server_config)
        state.grammars.pool.start()
        self._app, self._state = create_app(state, server_config), lifespan_state(state)

    def check_health(self) -> None:
        """Raise RuntimeError if the engine has died: then Ray starts another replica."""
        if not self._client.is_alive():
            raise RuntimeError("the engine has stopped")

    async def answer(self, prompt: bytes, scope: dict[str, Any], body: bytes) -> AsyncGenerator[dict[str, Any]]:  # noqa: ARG002
        """Yield the ASGI messages of the answer; `prompt` is for the router. Ending it aborts the request."""
        sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        room = asyncio.Semaphore(MAX_MESSAGES)
        bodies = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if bodies:
                return bodies.pop()
            await asyncio.Event().wait()  # a client that goes away ends the task
            raise AssertionError

        async def send(message: Any) -> None:
            await room.acquire()
            sent.put_nowait(message)

        async def run() -> None:
            try:
                await self._app({**scope, "state": dict(self._state)}, receive, send)  # pyright: ignore[reportArgumentType]
            finally:
                sent.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            while (message := await sent.get()) is not None:
                room.release()
                yield message
            await task
        finally:
            task.cancel()

    def __del__(self) -> None:
        """End the engine with the replica."""
        if hasattr(self, "_client"):
            self._client.close()


class PrefixRequestRouter(RequestRouter):
    """Gives a request to the replica that has most of its prompt in its cache, unless that has much more to do than
    others: `engine.router`, over bytes of prompts.
    """

    def initialize_state(self, **_: Any) -> None:
        """Begin with no replicas."""
        self._router = PrefixRouter(num_tokens=BYTES_OF_CACHE)
        self._numbers: dict[Any, int] = {}

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return the replica for a request, then all others."""
        if not candidate_replicas:
            return []
        by_number = {self._number(replica.replica_id): replica for replica in candidate_replicas}
        prompt = pending_request.args[0] if pending_request is not None and pending_request.args else b""
        chunks = prompt_chunks(list(prompt)) if isinstance(prompt, bytes) else []
        loads: list[int | None] = [None] * (max(by_number) + 1)
        for number, replica in by_number.items():
            loads[number] = self.replica_queue_len_cache.get(replica.replica_id) or 0
        best = self._router.choose(chunks, loads)
        others = [replica for number, replica in by_number.items() if number != best]
        return [[by_number[best]], others] if others else [[by_number[best]]]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:  # noqa: ARG002
        """Note which replica has got the prompt."""
        if pending_request.args and isinstance(pending_request.args[0], bytes):
            self._router.record(self._number(replica_id), prompt_chunks(list(pending_request.args[0])))

    def _number(self, replica_id: Any) -> int:
        """Return the number of a replica among those that are there; a new one takes that of one that is gone."""
        if replica_id not in self._numbers:
            for gone in self._numbers.keys() - self.curr_replicas.keys():
                self._router.forget(self._numbers.pop(gone))
            taken = set(self._numbers.values())  # more than MAX_REPLICAS while new ones replace old ones
            self._numbers[replica_id] = min(set(range(len(taken) + 1)) - taken)
        return self._numbers[replica_id]


class Door:
    """An ASGI application that reads bodies and lets replicas answer."""

    def __init__(self, engine: Any, max_body_size: int):
        """`engine` is the handle of the replicas. Bodies of more than `max_body_size` bytes are refused (413)."""
        self._engine = engine.options(stream=True)
        self._max_body_size = max_body_size

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer one request. If its replica dies before it answers, the answer is a 500, else the stream breaks."""
        if scope["type"] != "http":
            return
        parts, size, is_whole = [], 0, False
        while not is_whole:
            message = await receive()
            if message["type"] == "http.disconnect":  # before all of the body has come
                return
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body_size:
                message = f"the request body is larger than {self._max_body_size} bytes"
                await refusal(413, message)(scope, receive, send)
                return
            is_whole = not message.get("more_body")
        body = b"".join(parts)
        kept = {name: scope.get(name) for name in _SCOPE}
        answer = self._engine.answer.remote(prompt_bytes(body), kept, body)
        has_begun = False
        try:
            async for message in answer:
                has_begun = True
                await send(message)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        except Exception as error:
            logger.exception("a request has failed")
            if has_begun:
                raise
            why = "died" if isinstance(error, RayActorError) else "failed"
            message = f"the replica that ran this request has {why}"
            await refusal(500, message, kind="internal_error")(scope, receive, send)


_SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path", "query_string", "headers"),
    *("client", "server"),
)
"""What an application is told of a request."""


def app(arguments: Mapping[str, Any]) -> Any:
    """Return the application with these options: those of an engine, of a server, and of `Options`, by name.

    Raises ConfigError for options that are unknown or wrong, before any replica is started.
    """
    kinds = (Options, EngineConfig, ServerConfig)
    split: list[dict[str, Any]] = [
        {
            name: value_of(kind, name, value) if isinstance(value, str) else value  # `serve run` passes texts only
            for name, value in arguments.items()
            if name in {field.name for field in dataclasses.fields(kind)}
        }
        for kind in kinds
    ]
    if unknown := arguments.keys() - {name for some in split for name in some}:
        raise ConfigError(f"unknown options: {', '.join(sorted(unknown))}")
    of_application, engine, server = split
    options = Options(**of_application)
    EngineConfig(**engine)
    max_body_size = ServerConfig(**server).max_body_size
    replicas = serve.deployment(
        name="engine",
        max_ongoing_requests=options.max_ongoing_requests,
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target_ongoing_requests,
        },
        ray_actor_options={"num_gpus": options.num_gpus, "num_cpus": options.num_cpus},
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRequestRouter  # pyright: ignore[reportArgumentType] (of pydantic's constructor)
        ),
        health_check_period_s=2,
    )(Engine)
    door = serve.deployment(name="door", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0})

    def application() -> Door:  # in the door's process
        handle = serve.get_deployment_handle("engine", app_name=serve.get_replica_context().app_name)
        return Door(handle, max_body_size)

    return door(serve.ingress(application)()).bind(replicas.bind(engine, server))
