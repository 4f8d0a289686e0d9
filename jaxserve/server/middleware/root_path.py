"""Middleware for a server behind a proxy that serves it under a path of its own and does not strip that path."""

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Strips `root_path` from the paths of requests. Paths without it, such as direct probes, pass unchanged."""

    def __init__(self, app: ASGIApp, *, root_path: str):
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        path = scope.get("path", "")
        if path == self._root_path or path.startswith(f"{self._root_path}/"):
            scope = {**scope, "path": path.removeprefix(self._root_path) or "/"}
        await self._app(scope, receive, send)
