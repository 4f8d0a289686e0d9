"""The life of a server: whether it accepts requests, and how many are running."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator

from jaxserve.engine.client import EngineClient
from jaxserve.errors import Draining, EngineDead, Unavailable


@dataclasses.dataclass
class Life:
    """The requests of a server from its start to its end."""

    client: EngineClient
    is_draining: bool = False
    num_inside: int = 0
    stopping: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when running requests must end, with an error."""

    def why_closed(self) -> Unavailable | None:
        """Return the reason to accept no new request, or None."""
        if not self.client.is_alive():
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
