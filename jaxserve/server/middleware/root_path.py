"""Middleware for a server behind a proxy that offers it under a path of its own, and leaves that in requests."""

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Takes `root_path` off the paths of requests. Those without it, such as probes past the proxy, pass unchanged."""

    def __init__(self, app: ASGIApp, *, root_path: str):
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        path = scope.get("path", "")
        if path == self._root_path or path.startswith(f"{self._root_path}/"):
            scope = {**scope, "path": path.removeprefix(self._root_path) or "/"}
        await self._app(scope, receive, send)
