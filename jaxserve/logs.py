"""How log lines look, in every process of a command: text for people, or one JSON object a line for collectors.

A server's processes write them in a thread of their own, so that nothing else waits for whoever reads them.
"""

import json
import logging
import os
import sys
import threading
import time
from typing import Any, Literal, override

Format = Literal["text", "json"]

FIELDS = "fields"
"""Name of the `extra` with which a record carries a dict of its own fields; in text they are part of the message."""


MAX_HELD_BYTES = 4 * 2**20
"""Of lines that wait to be written, some 30,000; more are dropped, and counted."""

FLUSH_SECONDS = 1.0
"""For what waits at the end of the process."""


def configure(level: str, form: Format = "text", *, in_background: bool = False) -> None:
    """Log to standard error from now on: ours from `level` on, that of others from warning on.

    `in_background` is for processes that must go on when nobody reads what they write, or it cannot be written.
    """
    handler = _Background() if in_background else _StandardError()
    handler.setFormatter(
        JsonFormatter() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.handlers = [handler]
    logging.getLogger("jaxserve").setLevel(level.upper())


def flush() -> None:
    """Wait until what has been logged is written, before something else is: not for ever."""
    for handler in logging.getLogger().handlers:
        handler.flush()


class _StandardError(logging.StreamHandler[Any]):
    """Writes to what `sys.stderr` is at the time: who captures it (a test, a notebook) puts another in its place."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    @override
    def stream(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr


class _Background(logging.Handler):
    """Hands lines to a thread that writes them, as many as it can."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[bytes] = []
        self._num_held_bytes = 0
        self._num_dropped = 0
        self._is_writing = False
        self._changed = threading.Condition()  # of the four above
        threading.Thread(target=self._write_on, name="logs", daemon=True).start()

    @override
    def emit(self, record: logging.LogRecord) -> None:
        """Take a record: it is written soon, or dropped."""
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        except Exception:  # of the arguments' own methods; as logging has it for every handler
            self.handleError(record)
            return
        with self._changed:
            if self._num_held_bytes + len(line) > MAX_HELD_BYTES:
                self._num_dropped += 1
                return
            self._held.append(line)
            self._num_held_bytes += len(line)
            self._changed.notify_all()

    @override
    def flush(self) -> None:
        """Wait until all is written, for FLUSH_SECONDS."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held and not self._is_writing, timeout=FLUSH_SECONDS)

    def _write_on(self) -> None:
        num_lost = 0  # what was dropped, and not said so
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._held)
                lines, self._held, self._num_held_bytes = self._held, [], 0
                num_lost, self._num_dropped = num_lost + self._num_dropped, 0
                self._is_writing = True
            try:
                if num_lost:
                    _write(self._dropped_line(num_lost))
                num_lost = 0
                _write(b"".join(lines))
            except OSError:  # nobody will ever read it, or the disk is full: it has become known, or will
                num_lost += len(lines)

    def _dropped_line(self, number: int) -> bytes:
        message = "log lines that could not be written in time: %d"
        record = logging.LogRecord(__name__, logging.WARNING, "", 0, message, (number,), None)
        return f"{self.format(record)}\n".encode()


def _write(data: bytes) -> None:
    """Write to standard error: past its buffer, whose lock nobody could take from a thread that waits for a reader."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(2, rest) :]


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
