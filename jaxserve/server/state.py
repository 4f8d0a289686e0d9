"""What the requests of a server share, by the part that uses it.

One ServerState is made per server; it reaches the routes through the lifespan's state, not through a global. A route
takes from it what it uses, and passes on no more.
"""

import dataclasses
from typing import Any

from starlette.types import Scope

from jaxserve.metrics import Metrics
from jaxserve.server.engine_view import EngineView
from jaxserve.server.generation.chat import Chats
from jaxserve.server.generation.grammars import Grammars
from jaxserve.server.generation.reading import BodyReader
from jaxserve.server.generation.running import Runner
from jaxserve.server.generation.served_model import ServedModel
from jaxserve.server.responses.answer import Responses
from jaxserve.server.tracing import Tracing
from jaxserve.server.wire.life import Life
from jaxserve.server.wire.streaming import SlowReaders

_KEY = "server"


@dataclasses.dataclass(kw_only=True, frozen=True)
class ServerState:
    """The parts of a running server."""

    model: ServedModel
    life: Life
    reader: BodyReader
    runner: Runner
    grammars: Grammars
    responses: Responses
    metrics: Metrics
    engine_view: EngineView
    tracing: Tracing | None = None
    profile_dir: str | None = None
    slow_readers: SlowReaders = dataclasses.field(default_factory=SlowReaders)

    @property
    def chats(self) -> Chats:
        """What answers conversations."""
        return Chats(model=self.model, runner=self.runner, grammars=self.grammars)


def lifespan_state(state: ServerState) -> dict[str, Any]:
    """Return what the lifespan yields."""
    return {_KEY: state}


def server_state(scope: Scope) -> ServerState:
    """Return the ServerState of the server that handles this request."""
    return scope["state"][_KEY]
