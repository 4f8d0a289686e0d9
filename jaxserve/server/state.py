"""What the routes share: the engine's front end, the model's name, and whether the server is open.

One ServerState is made per server; it reaches the routes through the lifespan's state, not through a global.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from starlette.types import Scope

from jaxserve.engine.frontend import Frontend
from jaxserve.errors import Draining, EngineDead, ModelNotFound, Unavailable
from jaxserve.metrics import Metrics

_KEY = "server"


@dataclasses.dataclass(kw_only=True)
class ServerState:
    """`model` is the model's name in the API."""

    frontend: Frontend
    model: str
    metrics: Metrics
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    num_inside: int = 0
    stopping: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when requests may run no longer: they end with an error."""
    max_token_length: int = dataclasses.field(init=False)
    """Bytes of the longest token: a text of k bytes has at least k / max_token_length tokens."""

    def __post_init__(self) -> None:
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
