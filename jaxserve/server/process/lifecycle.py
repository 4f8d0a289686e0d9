"""The life of a process that serves HTTP: serve, drain when told to stop, and the exit code.

On SIGTERM or SIGINT it refuses new requests (503, /health too) and lets running ones finish, for at most
`shutdown_timeout` seconds; a second signal ends the wait. A dead engine ends the process with an error. `worker` runs a
Server over an engine in another process, `run` over one in this process.
"""

import asyncio
import logging
import os
import pathlib
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import override

import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from jaxserve.answers.choosing.choice import Choice, choose
from jaxserve.answers.choosing.served_tokenizer import served_tokenizer
from jaxserve.answers.model_syntax import ModelSyntax
from jaxserve.config import ServerConfig
from jaxserve.engine.frontend import Frontend
from jaxserve.metrics import Metrics
from jaxserve.server.app import METHODS_AND_PATHS, create_app
from jaxserve.server.engine_view import EngineView
from jaxserve.server.generation.grammars import Grammars
from jaxserve.server.generation.reading import BodyReader
from jaxserve.server.generation.running import Runner
from jaxserve.server.generation.served_model import ServedModel
from jaxserve.server.generation.unknown_fields import UnknownFields
from jaxserve.server.process.announcement import announce, url_of
from jaxserve.server.process.listening import BACKLOG
from jaxserve.server.process.settings import FLUSH_TIMEOUT
from jaxserve.server.process.tls import ssl_context
from jaxserve.server.responses.answer import Responses, fail_abandoned
from jaxserve.server.responses.store import ResponseStore
from jaxserve.server.state import ServerState, lifespan_state
from jaxserve.server.tracing import start_tracing
from jaxserve.server.wire.http import protocol_class
from jaxserve.server.wire.life import Life

logger = logging.getLogger(__name__)

DEATH_NOTICE = 0.5  # seconds for which /health reports a dead engine before the server stops
POLL_INTERVAL = 0.05  # seconds between checks of the engine and of draining
DESCRIPTORS_LOG_INTERVAL = 60.0  # seconds between log lines about missing file descriptors


def run(frontend: Frontend, server_config: ServerConfig, *, listener: socket.socket) -> int:
    """Serve until a signal or the engine's death; blocks. The caller closes `frontend.client` afterwards.

    `frontend` has the tokenizer and the model's sampling defaults, `listener` is what `bind` returned. Returns the exit
    code: 0 when told to stop, 1 when the engine died. Raises ConfigError.
    """
    frontend.tokenizer = served_tokenizer(frontend.tokenizer, server_config)
    return Server(frontend, server_config, listener=listener).run()


def _choose(frontend: Frontend, config: ServerConfig) -> Choice:
    return choose(
        frontend.tokenizer, tool_call_parser=config.tool_call_parser, reasoning_parser=config.reasoning_parser
    )


def make_state(
    frontend: Frontend,
    config: ServerConfig,
    choice: Choice | None = None,
    *,
    metrics_file: pathlib.Path | None = None,
    responses_file: pathlib.Path | None = None,
    worker: str = "",
) -> ServerState:
    """Make the state of the routes, for a server or for a batch; arguments are as in `Server`. Raises ConfigError."""
    names = tuple(config.served_model_name) or (frontend.client.info.model,)
    metrics = Metrics(
        model=names[0],
        stats=frontend.client.stats_by_engine,
        cache_config=frontend.client.info_of_one.cache_labels(),
        names=config.metrics_names,
        routes=METHODS_AND_PATHS,
        file=metrics_file,
    )
    choice = choice or _choose(frontend, config)
    model = ServedModel(
        frontend=frontend,
        names=names,
        syntax=ModelSyntax(frontend.tokenizer, choice.syntax, vocab_size=frontend.client.info.vocab_size),
        pooling=config.pooling,
    )
    model.prepare()
    life = Life(frontend.client)
    tracing = None if config.otlp_traces_endpoint is None else start_tracing(config.otlp_traces_endpoint)
    store = ResponseStore(
        max_entries=config.max_stored_responses, ttl=config.response_ttl, file=responses_file, worker=worker
    )
    return ServerState(
        model=model,
        life=life,
        reader=BodyReader(
            check_model=model.check_name,
            unknown_fields=UnknownFields(metrics),
            forces_usage=config.enable_force_include_usage,
            shows_token_ids=config.return_tokens_as_token_ids,
        ),
        runner=Runner(
            frontend=frontend,
            metrics=metrics,
            tracing=tracing,
            request_timeout=config.request_timeout,
            stopping=life.stopping,
        ),
        grammars=Grammars(
            pool=frontend.grammars, closes_objects=config.disable_additional_properties, stopping=life.stopping
        ),
        responses=Responses(store=store, life=life),
        metrics=metrics,
        engine_view=EngineView(frontend.client),
        tracing=tracing,
        profile_dir=config.profile_dir,
    )


class Server:
    """One HTTP server over one engine. `address` is (host, port) as bound."""

    def __init__(
        self,
        frontend: Frontend,
        config: ServerConfig,
        *,
        listener: socket.socket,
        metrics_file: pathlib.Path | None = None,
        responses_file: pathlib.Path | None = None,
        worker: str = "",
    ):
        """Prepare a server.

        `metrics_file` is this server's file in a folder common to all workers, whose sums /metrics reports;
        `responses_file` holds the stored responses of all of them. None if there are no others. `worker` names this one
        across restarts: responses that its predecessor left unfinished are marked as failed.
        """
        self._choice = _choose(frontend, config)
        self.state = make_state(
            frontend, config, self._choice, metrics_file=metrics_file, responses_file=responses_file, worker=worker
        )
        fail_abandoned(self.state.responses.store)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._listener = listener
        self._config = config
        self._is_stopping = False
        self._has_engine_died = False
        self._quiet_until = 0.0  # no log line about descriptors before then
        self._app = create_app(self.state, config)
        is_debug = config.log_level == "debug"
        tls = ssl_context(config)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                self._app,
                lifespan="on",
                http=protocol_class(config.receive_timeout, config.allowed_origins),
                ws="none",
                log_config=None,
                log_level="debug" if is_debug else "warning",
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                ssl_context_factory=None if tls is None else lambda *_: tls,
                timeout_keep_alive=config.keep_alive_timeout,
                timeout_graceful_shutdown=FLUSH_TIMEOUT,
            ),
            on_signal=self.stop,
        )

    def run(self) -> int:
        """Run `serve` in an event loop of its own; log what is served once connections are accepted."""

        def say() -> None:
            self.tell_choices()
            self.announce()

        return uvloop.run(self.serve(on_serving=say))

    def announce(self) -> None:
        """Log what is served, and where."""
        frontend = self.state.model.frontend
        announce(
            frontend.client.info,
            self._config,
            names=self.state.model.names,
            url=url_of(self._listener, self._config),
            has_chat=frontend.tokenizer.has_chat_template,
        )

    def tell_choices(self) -> None:
        """Log the syntax in which the model's answers are parsed, and the pooling of embeddings if a file names one."""
        embedder, pooling = self.state.model.frontend.embedder, self.state.model.pooling
        if embedder.source is not None:
            own = "+".join(embedder.pooling)
            if pooling is not None:
                logger.info("pooling: %s, by --pooling; %s says %s", pooling, embedder.source, own)
            else:
                logger.info("pooling: %s, by %s", own, embedder.source)
        if self.state.model.frontend.tokenizer.has_chat_template:
            for title, text in self._choice.rows():
                logger.info("%s: %s", title, text)

    async def serve(self, *, on_serving: Callable[[], None]) -> int:
        """Serve, and return the process's exit code. `on_serving` is called once connections are accepted."""
        supervisor = asyncio.create_task(self._supervise(on_serving))
        try:
            await self._uvicorn.serve(sockets=[self._listener])
        finally:
            supervisor.cancel()
            if self.state.tracing is not None:
                await asyncio.to_thread(self.state.tracing.close)
            self.state.responses.store.close()
        return 1 if self._has_engine_died else 0

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of a connection that was accepted elsewhere."""
        await self._app({**scope, "state": lifespan_state(self.state)}, receive, send)

    def drain(self) -> None:
        """Refuse new requests, and end when the running ones have finished. Thread-safe."""
        self.state.life.is_draining = True

    def stop_now(self) -> None:
        """Refuse new requests, and abort the running ones. Thread-safe."""
        self.state.life.is_draining = self._is_stopping = True

    def stop(self) -> None:
        """Drain and end; called again, end now, as for signals. Callable from any thread or signal handler."""
        (self.stop_now if self.state.life.is_draining else self.drain)()

    @property
    def is_serving(self) -> bool:
        """True once connections are accepted."""
        return self._uvicorn.started

    async def _supervise(self, on_serving: Callable[[], None]) -> None:
        """Report that the server is up, wait for a reason to stop, then drain and close it."""
        while not self.is_serving:
            await asyncio.sleep(POLL_INTERVAL)
        on_serving()
        while not self.state.life.is_draining and self._is_engine_alive():
            self._look_for_descriptors()
            await asyncio.sleep(POLL_INTERVAL)
        self.state.life.is_draining = True
        if self._is_engine_alive():
            logger.info("shutting down%s", _what_may_finish(self.state.life.num_inside))
            await self._empty(self._config.shutdown_timeout, lambda: not self._is_stopping and self._is_engine_alive())
        if self._has_engine_died:
            await asyncio.sleep(DEATH_NOTICE)
            await self._empty(FLUSH_TIMEOUT)  # the front end is reporting it to each request
        if self.state.life.num_inside:
            logger.warning("requests are cut off: %d", self.state.life.num_inside)
            self.state.life.stopping.set()
            await self._empty(FLUSH_TIMEOUT)
        self._uvicorn.should_exit = True

    async def _empty(self, timeout: float, is_patient: Callable[[], bool] = lambda: True) -> None:
        """Wait until no request is running and every answer is sent, for `timeout` seconds and while `is_patient`."""
        deadline = time.monotonic() + timeout
        while self.state.life.num_inside or self._uvicorn.num_unsent_bytes:
            if time.monotonic() >= deadline or not is_patient():
                return
            await asyncio.sleep(POLL_INTERVAL)

    def _look_for_descriptors(self) -> None:
        """Log a lack of file descriptors: the event loop silently closes connections that it has none for."""
        try:
            os.close(os.dup(self._listener.fileno()))
        except OSError as error:
            if (now := time.monotonic()) >= self._quiet_until:
                self._quiet_until = now + DESCRIPTORS_LOG_INTERVAL
                logger.error("connections are turned away: %s; raise the limit (ulimit -n)", error.strerror)

    def _is_engine_alive(self) -> bool:
        self._has_engine_died |= not self.state.model.frontend.client.is_alive()
        return not self._has_engine_died


def _what_may_finish(num_requests: int) -> str:
    if num_requests == 0:
        return ""
    return ": 1 request may finish" if num_requests == 1 else f": {num_requests} requests may finish"


class _Uvicorn(uvicorn.Server):
    """Uvicorn with its signal handling replaced: it would close the listener first, and end by the signal itself."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]):
        super().__init__(config)
        self._on_signal = on_signal

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes of finished answers that slow clients have not read yet."""
        transports = [connection.transport for connection in self.server_state.connections]
        return sum(transport.get_write_buffer_size() for transport in transports if transport is not None)

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM or SIGINT."""
        self._on_signal()
