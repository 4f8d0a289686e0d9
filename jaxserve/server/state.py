"""What the routes share: the engine's front end, the model's name, and whether the server is open.

One ServerState is made per server; it reaches the routes through the lifespan's state, not through a global.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Iterator
from typing import Any

from starlette.types import Scope

from jaxserve import __version__
from jaxserve.engine.frontend import Frontend
from jaxserve.errors import Draining, EngineDead, ModelNotFound, Unavailable
from jaxserve.metrics import Metrics
from jaxserve.request import Pooling
from jaxserve.server.engine_view import EngineView
from jaxserve.server.message_style import message_style
from jaxserve.server.parsing.model import ModelSyntax
from jaxserve.server.protocol.messages import MessageStyle
from jaxserve.server.responses.store import ResponseStore
from jaxserve.server.streaming import SlowReaders
from jaxserve.server.tracing import Tracing
from jaxserve.server.unknown_fields import UnknownFields

_KEY = "server"
MAX_TOKENIZING = 2
MAX_PREPARING = 4


@dataclasses.dataclass(kw_only=True)
class ServerState:
    """`model` is the model's name in the API. `request_timeout`: seconds a request may take, None for any."""

    frontend: Frontend
    model: str
    metrics: Metrics
    request_timeout: float | None = None
    tracing: Tracing | None = None
    pooling: Pooling = "last"
    """What embeddings are made of, unless a request says it."""
    profile_dir: str | None = None
    responses: ResponseStore
    """Answers of /v1/responses."""
    background: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)
    """Those that run without a connection."""
    syntax: ModelSyntax
    """How the model writes thoughts and tool calls."""
    closes_objects: bool = True
    """Whether objects whose schema names properties have no others, where neither it nor the request says."""
    tokenizing: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(MAX_TOKENIZING))
    """Whoever tokenizes a large body holds it: 8 MiB may keep a core busy for seconds, and take 2 GiB."""
    preparing: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(MAX_PREPARING))
    """Whoever tokenizes a body of middle size holds it."""
    slow_readers: SlowReaders = dataclasses.field(default_factory=SlowReaders)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    fingerprint: str = dataclasses.field(init=False)
    """Names what has made an answer: this version and the served model."""
    is_draining: bool = False
    num_inside: int = 0
    stopping: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when requests may run no longer: they end with an error."""
    unknown_fields: UnknownFields = dataclasses.field(init=False)
    engine_view: EngineView = dataclasses.field(init=False)
    message_style: MessageStyle = dataclasses.field(init=False)
    """How the chat template wants tool calls of earlier turns."""
    max_token_length: int = dataclasses.field(init=False)
    """Bytes of the longest token: a text of k bytes has at least k / max_token_length tokens."""

    def __post_init__(self) -> None:
        digest = hashlib.sha256(f"{__version__}\n{self.model}\n{self.frontend.client.info.model}".encode()).hexdigest()
        self.fingerprint = f"fp_{digest[:12]}"
        self.unknown_fields = UnknownFields(self.metrics.unknown_fields)
        self.engine_view = EngineView(self.frontend.client)
        self.message_style = message_style(self.frontend.tokenizer)
        tokenizer = self.frontend.tokenizer
        lengths = (len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.max_token_id + 1))
        self.max_token_length = max(1, max(lengths, default=1))

    def why_closed(self) -> Unavailable | None:
        """The reason to take no new request, if there is one."""
        if not self.frontend.client.is_alive():
            return EngineDead("the engine has stopped")
        if self.is_draining:
            return Draining("the server is shutting down")
        return None

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request as inside; a draining server waits for it."""
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound unless `name` is served here. None is whatever is served."""
        if name is not None and name != self.model:
            raise ModelNotFound(f"the model {name[:200]!r} does not exist", param="model", code="model_not_found")


def lifespan_state(state: ServerState) -> dict[str, Any]:
    """What the lifespan yields."""
    return {_KEY: state}


def server_state(scope: Scope) -> ServerState:
    """The ServerState of the server that handles this request."""
    return scope["state"][_KEY]
