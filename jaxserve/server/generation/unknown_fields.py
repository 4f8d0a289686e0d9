"""What is ignored in requests: unknown fields, which are counted, and parts without effect; each is logged once."""

import difflib
import logging

from jaxserve.metrics import Metrics
from jaxserve.server.protocol.names import UnknownName

logger = logging.getLogger(__name__)

MAX_NAMES = 256
"""Maximum number of names logged by a server, since clients choose them."""

MAX_NAME_LENGTH = 64
"""Maximum characters of a name that are logged."""


class UnknownFields:
    """Counts unknown fields, and logs each name the first time, with the known name closest to it."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._logged: set[tuple[str, str]] = set()

    def count(self, unknown: UnknownName, *, route: str) -> None:
        """Count an unknown field in a request to `route`."""
        self._metrics.count("unknown_request_fields_total")
        name = unknown.name[:MAX_NAME_LENGTH]
        shown = unknown.path + name
        if not self._is_new(route, shown):
            return
        nearest = difflib.get_close_matches(name, sorted(unknown.known), n=1, cutoff=0.75)
        hint = f", did you mean {unknown.path + nearest[0]!r}?" if nearest else ""
        logger.warning("unknown field %r of a request (%s) is ignored%s", shown, route, hint)

    def ignore(self, what: str, *, route: str) -> None:
        """Log the first time that a known part of a request to `route` is ignored."""
        if self._is_new(route, what):
            logger.warning("a request (%s) has %s: ignored", route, what)

    def _is_new(self, route: str, name: str) -> bool:
        if (route, name) in self._logged or len(self._logged) >= MAX_NAMES:
            return False
        self._logged.add((route, name))
        return True
