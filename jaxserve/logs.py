"""The format of log lines in every process of a command: text for people, or one JSON object per line for collectors.

A server's processes write them in a thread of their own, so that a slow reader of the log delays nothing else.
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
"""Name of the `extra` that holds a dict of a record's own fields; as text they are part of the message."""


MAX_HELD_BYTES = 4 * 2**20
"""Limit of the bytes waiting to be written, some 30,000 lines; lines beyond it are dropped and counted."""

FLUSH_SECONDS = 1.0
"""How long `flush` waits for pending lines, e.g. at the end of the process."""


def configure(
    level: str, form: Format = "text", *, in_background: bool = False, process_name: str | None = None
) -> None:
    """Log to standard error from now on: this package's messages from `level` on, others from warning on.

    `in_background` is for processes that must go on even if their log is not read or cannot be written. Each line has
    `process_name`, if one is given.
    """
    handler = _Background() if in_background else _StandardError()
    named = "" if process_name is None else f"[{process_name}] "
    text = logging.Formatter(f"%(asctime)s %(levelname)s {named}%(name)s: %(message)s")
    handler.setFormatter(JsonFormatter(process_name) if form == "json" else text)
    root = logging.getLogger()
    root.handlers = [handler]
    logging.getLogger("jaxserve").setLevel(level.upper())


def flush() -> None:
    """Wait until pending lines are written, at most FLUSH_SECONDS."""
    for handler in logging.getLogger().handlers:
        handler.flush()


class _StandardError(logging.StreamHandler[Any]):
    """A handler that looks `sys.stderr` up for each line: whoever captures it (a test, a notebook) replaces it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    @override
    def stream(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr


class _Background(logging.Handler):
    """A handler whose lines are written by a thread. Lines that do not fit into the buffer are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[bytes] = []
        self._num_held_bytes = 0
        self._num_dropped = 0
        self._is_writing = False
        self._changed = threading.Condition()  # guards the four above
        threading.Thread(target=self._write_on, name="logs", daemon=True).start()

    @override
    def emit(self, record: logging.LogRecord) -> None:
        """Buffer a record to be written soon, or drop it."""
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        except Exception:  # raised by the arguments' own methods; handled as in every logging handler
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
        """Wait until all lines are written, at most FLUSH_SECONDS."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held and not self._is_writing, timeout=FLUSH_SECONDS)

    def _write_on(self) -> None:
        num_lost = 0  # dropped lines not yet reported
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
            except OSError:  # the reader is gone or the disk is full: the lines count as dropped
                num_lost += len(lines)

    def _dropped_line(self, number: int) -> bytes:
        message = "log lines that could not be written in time: %d"
        record = logging.LogRecord(__name__, logging.WARNING, "", 0, message, (number,), None)
        return f"{self.format(record)}\n".encode()


def _write(data: bytes) -> None:
    """Write to standard error, bypassing its buffer, whose lock a blocked writer could hold forever."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(2, rest) :]


class JsonFormatter(logging.Formatter):
    """Formats time (UTC), level, logger, the process's name if it has one, message, the record's own fields, and the
    traceback if there is one.
    """

    def __init__(self, process_name: str | None = None):
        super().__init__()
        self._process_name = process_name

    @override
    def format(self, record: logging.LogRecord) -> str:
        """Format the record as one line."""
        created = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{created}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            **({} if self._process_name is None else {"process": self._process_name}),
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
