"""Time as connections see it, controlled by the test, so that no machine is too slow for a timeout."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from waiting import PATIENCE

from jaxserve.server.wire.http import HttpProtocol


@dataclasses.dataclass
class _Timer:
    due: float
    call: Callable[[], object]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class _Loop:
    """An event loop as a connection sees it."""

    def __init__(self, loop: Any, clock: "WireClock"):
        self._loop = loop
        self.call_later = clock.call_later

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


class WireClock:
    """The timers of all connections that are made while it is put in, which only `advance` sets off.

    `num_open` connections are there, and have brought `num_received` bytes.
    """

    def __init__(self, monkeypatch: Any):
        self.num_open = self.num_received = 0
        self._loop: Any = None
        self._now = 0.0
        self._timers: list[_Timer] = []
        made, received = HttpProtocol.connection_made, HttpProtocol.data_received
        lost = HttpProtocol.connection_lost

        def connection_made(protocol: Any, transport: Any) -> None:
            self._loop, protocol.loop = protocol.loop, _Loop(protocol.loop, self)
            made(protocol, transport)
            self.num_open += 1

        def data_received(protocol: Any, data: bytes) -> None:
            received(protocol, data)
            self.num_received += len(data)

        def connection_lost(protocol: Any, exc: Exception | None) -> None:
            lost(protocol, exc)
            self.num_open -= 1

        for replacement in (connection_made, data_received, connection_lost):
            monkeypatch.setattr(HttpProtocol, replacement.__name__, replacement)

    def call_later(self, delay: float, call: Callable[[], object]) -> _Timer:
        """Replaces the loop's method for the connections."""
        timer = _Timer(self._now + delay, call)
        self._timers.append(timer)
        return timer

    def advance(self, seconds: float) -> None:
        """Let time pass. Everything that is due has happened when this returns."""
        has_passed = threading.Event()

        def run() -> None:
            self._now += seconds
            due = [timer for timer in self._timers if timer.due <= self._now]
            self._timers = [timer for timer in self._timers if timer.due > self._now]
            for timer in due:
                if not timer.is_cancelled:
                    timer.call()
            has_passed.set()

        self._loop.call_soon_threadsafe(run)
        assert has_passed.wait(PATIENCE)
