"""Unknown fields of requests: ignored, counted, and reported to the operator once."""

import difflib
import logging

from jaxserve.metrics import Counter
from jaxserve.server.protocol.names import UnknownName

logger = logging.getLogger(__name__)

MAX_NAMES = 256
"""Maximum number of names logged by a server, since clients choose them."""

MAX_NAME_LENGTH = 64
"""Maximum characters of a name that are logged."""


class UnknownFields:
    """Counts unknown fields, and logs each name the first time, with the known name closest to it."""

    def __init__(self, counter: Counter):
        self._counter = counter
        self._logged: set[tuple[str, str]] = set()

    def count(self, unknown: UnknownName, *, route: str) -> None:
        """Count an unknown field in a request to `route`."""
        self._counter.inc(1)
        name = unknown.name[:MAX_NAME_LENGTH]
        shown = unknown.path + name
        if (route, shown) in self._logged or len(self._logged) >= MAX_NAMES:
            return
        self._logged.add((route, shown))
        nearest = difflib.get_close_matches(name, sorted(unknown.known), n=1, cutoff=0.75)
        hint = f", did you mean {unknown.path + nearest[0]!r}?" if nearest else ""
        logger.warning("unknown field %r of a request (%s) is ignored%s", shown, route, hint)
