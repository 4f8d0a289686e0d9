"""Wait for another thread or process: however slow the machine, only what is broken reaches the limit."""

import asyncio
import time
from collections.abc import Awaitable, Callable

PATIENCE = 240.0
"""Limit in seconds for what is certain to happen. A test as a whole has 600."""


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when it holds. Raises TimeoutError."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come about")
        time.sleep(0.002)


async def until(condition: Callable[[], bool | Awaitable[bool]], *, interval: float = 0.01) -> None:
    """Return when the condition holds; other tasks run meanwhile. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE):
        while not (holds if isinstance(holds := condition(), bool) else await holds):
            await asyncio.sleep(interval)
