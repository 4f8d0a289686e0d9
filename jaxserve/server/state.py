"""State common to all routes: the engine's front end, the model's name, and whether the server accepts requests.

One ServerState is made per server; it reaches the routes through the lifespan's state, not through a global.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.types import Scope

from jaxserve import __version__
from jaxserve.engine.frontend import Frontend
from jaxserve.errors import Draining, EngineDead, ModelNotFound, Unavailable
from jaxserve.metrics import Metrics
from jaxserve.request import Pooling
from jaxserve.server.engine_view import EngineView
from jaxserve.server.message_style import message_style
from jaxserve.server.model_syntax import ModelSyntax
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
    """What the routes share. `request_timeout`: seconds a request may take, None for any number."""

    frontend: Frontend
    names: Sequence[str]
    """Names of the model in the API; answers have the first one."""
    metrics: Metrics
    request_timeout: float | None = None
    tracing: Tracing | None = None
    pooling: Pooling | None = None
    """Default pooling of embeddings, None for the model's own."""
    profile_dir: str | None = None
    responses: ResponseStore
    """Stored answers of /v1/responses."""
    background: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)
    """Tasks of responses that run without a connection."""
    syntax: ModelSyntax
    """How the model writes thoughts and tool calls."""
    closes_objects: bool = True
    """Default for schemas that name properties: if true, their objects have no others."""
    forces_usage: bool = False
    """True if streams end with their usage, whether the request asks for it or not."""
    shows_token_ids: bool = False
    """Default of `return_tokens_as_token_ids`."""
    tokenizing: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(MAX_TOKENIZING))
    """Held while a large body is tokenized: 8 MiB may keep a core busy for seconds, and take 2 GiB."""
    preparing: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(MAX_PREPARING))
    """Held while a body of medium size is tokenized."""
    slow_readers: SlowReaders = dataclasses.field(default_factory=SlowReaders)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    fingerprint: str = dataclasses.field(init=False)
    """Identifies what makes the answers: this version and the served model."""
    is_draining: bool = False
    num_inside: int = 0
    stopping: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when running requests must end, with an error."""
    unknown_fields: UnknownFields = dataclasses.field(init=False)
    engine_view: EngineView = dataclasses.field(init=False)
    message_style: MessageStyle = dataclasses.field(init=False)
    """How the chat template expects tool calls of earlier turns."""
    max_token_length: int = dataclasses.field(init=False)
    """Bytes of the longest token: a text of k bytes has at least k / max_token_length tokens."""

    def __post_init__(self) -> None:
        digest = hashlib.sha256(f"{__version__}\n{self.model}\n{self.frontend.model}".encode()).hexdigest()
        self.fingerprint = f"fp_{digest[:12]}"
        self.unknown_fields = UnknownFields(self.metrics.unknown_fields)
        self.engine_view = EngineView(self.frontend.client)
        self.message_style = message_style(self.frontend.tokenizer)
        tokenizer = self.frontend.tokenizer
        lengths = (len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.max_token_id + 1))
        self.max_token_length = max(1, max(lengths, default=1))

    @property
    def model(self) -> str:
        """The model's name in answers."""
        return self.names[0]

    def why_closed(self) -> Unavailable | None:
        """Return the reason to accept no new request, or None."""
        if not self.frontend.client.is_alive():
            return EngineDead("the engine has stopped")
        if self.is_draining:
            return Draining("the server is shutting down")
        return None

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a running request; a draining server waits for it."""
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound unless `name` is served here. None is whatever is served."""
        if name is not None and name not in self.names:
            raise ModelNotFound(f"the model {name[:200]!r} does not exist", param="model", code="model_not_found")


def lifespan_state(state: ServerState) -> dict[str, Any]:
    """Return what the lifespan yields."""
    return {_KEY: state}


def server_state(scope: Scope) -> ServerState:
    """Return the ServerState of the server that handles this request."""
    return scope["state"][_KEY]
