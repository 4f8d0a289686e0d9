"""The life of the server process: take the port, serve, drain when told to stop, and the exit code.

SIGTERM or SIGINT closes the door (503 for new requests, /health too) and lets what runs finish, for
`shutdown_timeout` seconds at most; a second signal ends the wait. A dead engine ends the process with an error.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import override

import uvicorn

from jaxserve.config import ServerConfig
from jaxserve.engine.frontend import Frontend
from jaxserve.errors import StartupError
from jaxserve.metrics import Metrics
from jaxserve.server.app import create_app
from jaxserve.server.state import ServerState

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT = 2  # seconds for the last bytes of answers to reach their clients
POLL_INTERVAL = 0.05  # seconds between two looks at the engine and the door
PARSER_BUFFER = 256 * 1024  # bytes of headers that are parsed, so that too many are answered with 431


def bind(config: ServerConfig) -> socket.socket:
    """A socket on the configured address, not yet listening: the port is taken before the engine starts.

    Raises StartupError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartupError(f"cannot listen on {config.host}:{config.port}: {reason}") from error
    return listener


def run(frontend: Frontend, server_config: ServerConfig, *, listener: socket.socket | None = None) -> int:
    """Serve until a signal or the engine's death; blocks. The caller closes `frontend.client` afterwards.

    `frontend` brings the tokenizer and the model's sampling defaults. `listener` is what `bind` returned; without it
    the port is taken here. Returns the exit code: 0 when told to stop, 1 when the engine died. Raises StartupError.
    """
    return Server(frontend, server_config, listener=listener or bind(server_config)).run()


class Server:
    """One HTTP server over one engine. `address` is (host, port) as bound."""

    def __init__(self, frontend: Frontend, config: ServerConfig, *, listener: socket.socket):
        model = config.served_model_name or frontend.client.info.model
        metrics = Metrics(model=model, stats=frontend.client.stats)
        self.state = ServerState(frontend=frontend, model=model, metrics=metrics)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._listener = listener
        self._shutdown_timeout = config.shutdown_timeout
        self._num_stops = 0
        self._has_engine_died = False
        is_debug = config.log_level == "debug"
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                create_app(self.state, config),
                lifespan="on",
                http="h11",  # chosen by name, as its limit on headers is ours
                ws="none",
                log_config=None,
                log_level="debug" if is_debug else "warning",
                access_log=is_debug,
                server_header=False,
                h11_max_incomplete_event_size=PARSER_BUFFER,
                timeout_graceful_shutdown=FLUSH_TIMEOUT,
            ),
            on_signal=self.stop,
        )

    def run(self) -> int:
        """Serve, and return the process's exit code."""
        return asyncio.run(self._serve())

    def stop(self) -> None:
        """Drain and end; called again, end now. From any thread or a signal handler."""
        self._num_stops += 1

    @property
    def is_serving(self) -> bool:
        """Whether connections are taken."""
        return self._uvicorn.started

    async def _serve(self) -> int:
        supervisor = asyncio.create_task(self._supervise())
        try:
            await self._uvicorn.serve(sockets=[self._listener])
        finally:
            supervisor.cancel()
        return 1 if self._has_engine_died else 0

    async def _supervise(self) -> None:
        """Say that the server is there, wait for a reason to stop, then empty the house and close it."""
        while not self.is_serving:
            await asyncio.sleep(POLL_INTERVAL)
        host, port = self.address
        logger.info("serving %s at http://%s:%d/v1", self.state.model, f"[{host}]" if ":" in host else host, port)
        while self._num_stops == 0 and self._is_engine_alive():
            await asyncio.sleep(POLL_INTERVAL)
        self.state.is_draining = True
        if self._is_engine_alive():
            logger.info("shutting down: %d requests may finish", self.state.num_inside)
            await self._empty(self._shutdown_timeout, lambda: self._num_stops < 2 and self._is_engine_alive())
        if self._has_engine_died:
            await self._empty(FLUSH_TIMEOUT)  # each request is being told so by the front end
        if self.state.num_inside:
            logger.warning("%d requests are cut off", self.state.num_inside)
            self.state.stopping.set()
            await self._empty(FLUSH_TIMEOUT)
        self._uvicorn.should_exit = True

    async def _empty(self, timeout: float, is_patient: Callable[[], bool] = lambda: True) -> None:
        """Wait until no request is inside, for `timeout` seconds and while `is_patient`."""
        deadline = time.monotonic() + timeout
        while self.state.num_inside and time.monotonic() < deadline and is_patient():
            await asyncio.sleep(POLL_INTERVAL)

    def _is_engine_alive(self) -> bool:
        self._has_engine_died |= not self.state.frontend.client.is_alive()
        return not self._has_engine_died


class _Uvicorn(uvicorn.Server):
    """Uvicorn, with its answer to signals replaced: it would cut the door first, and end by the signal itself."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]):
        super().__init__(config)
        self._on_signal = on_signal

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT has come."""
        self._on_signal()
