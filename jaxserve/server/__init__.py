"""The HTTP side: an OpenAI-compatible Starlette app over an EngineClient. No jax in this package.

`supervisor.serve` is `jaxserve serve`, with all its processes. In one process, `run` serves until it is told to stop;
`bind` takes the port early, before a slow engine start; `create_app` is the bare ASGI application.
"""

from jaxserve.server.app import create_app
from jaxserve.server.process.lifecycle import bind, run

__all__ = ["bind", "create_app", "run"]
