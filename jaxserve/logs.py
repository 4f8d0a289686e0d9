"""How log lines look, in every process of a command: text for people, or one JSON object a line for collectors."""

import json
import logging
import sys
import time
from typing import Any, Literal, override

Format = Literal["text", "json"]

FIELDS = "fields"
"""Name of the `extra` with which a record carries a dict of its own fields; in text they are part of the message."""


def configure(level: str, form: Format = "text") -> None:
    """Log to standard error from now on: ours from `level` on, that of others from warning on."""
    handler = _StandardError()
    handler.setFormatter(
        JsonFormatter() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.handlers = [handler]
    logging.getLogger("jaxserve").setLevel(level.upper())


class _StandardError(logging.StreamHandler[Any]):
    """Writes to what `sys.stderr` is at the time: who captures it (a test, a notebook) puts another in its place."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    @override
    def stream(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr


class JsonFormatter(logging.Formatter):
    """time (UTC), level, logger, message, the record's own fields, and the traceback if there is one."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        created = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{created}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
