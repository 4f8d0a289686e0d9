"""Paths that are answered without a key."""

from jaxserve.server.routes import docs, playground

OPEN_PATHS = playground.FILES | docs.FILES | {"/live", "/health", "/ping"}
