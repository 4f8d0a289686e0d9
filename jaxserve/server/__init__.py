"""The HTTP side: an OpenAI-compatible Starlette app over an EngineClient. No jax in this package.

`supervisor.serve` is `jaxserve serve`, with all its processes. In one process, `run` serves until it is told to stop;
`bind` takes the port early, before a slow engine start; `create_app` is the bare ASGI application.
"""

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "bind": "jaxserve.server.process.listening",
    "create_app": "jaxserve.server.app",
    "run": "jaxserve.server.process.lifecycle",
}
__all__ = ["bind", "create_app", "run"]

if TYPE_CHECKING:
    from jaxserve.server.app import create_app
    from jaxserve.server.process.lifecycle import run
    from jaxserve.server.process.listening import bind


def __getattr__(name: str) -> Any:
    """Import on first use: the parent of a server's processes starts the engine before anything takes long."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
