"""Answers of /v1/responses that later turns may refer to: bounded in number, bytes and time.

Stored in SQLite, so that all workers of a server see the same: in a file of their private folder, which is removed with
the server, or in memory.
"""

import contextlib
import logging
import pathlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

logger = logging.getLogger(__name__)

MAX_BYTES = 256 * 2**20
"""Limit of all bodies and conversations together; the oldest are removed first."""

_PATIENCE = 10.0
"""Seconds that a process waits for others that use the file."""

_SCHEMA = """
create table if not exists responses (
    id text primary key,
    owner text not null,
    number integer not null,  -- order of arrival
    expires real not null,
    body blob not null,
    items blob not null,
    num_inputs integer not null,
    is_cancelled integer not null default 0,
    worker text  -- that still writes it; null when it is complete
);
create index if not exists by_number on responses (number);
create table if not exists items (
    id text primary key,
    response_id text not null references responses (id) on delete cascade
);
create index if not exists by_response on items (response_id);
create table if not exists events (
    response_id text not null references responses (id) on delete cascade,
    number integer not null,  -- the event's sequence number
    frame blob not null,
    primary key (response_id, number)
);
"""


class StoredResponse(NamedTuple):
    """A stored answer.

    `body` is the answer's JSON; `items` that of the conversation including the answer, of which the first `num_inputs`
    are the input.
    """

    body: bytes
    items: bytes
    num_inputs: int
    item_ids: tuple[str, ...] = ()
    """Ids of the answer's own items, for looking it up; empty when read from the store."""

    @property
    def columns(self) -> tuple[bytes, bytes, int]:
        """The columns of the table of responses."""
        return self.body, self.items, self.num_inputs


class ResponseStore:
    """At most `max_entries` answers, each for `ttl` seconds. Thread-safe, and usable by several processes at once.

    The oldest are removed first; incomplete ones are removed last, and their time starts on completion. If the file
    cannot be written, e.g. because the disk is full, methods raise sqlite3.Error. Only its `owner` (the name of an API
    key) can read or delete an answer: for others it does not exist.
    """

    def __init__(
        self,
        *,
        max_entries: int,
        ttl: float,
        file: pathlib.Path | None = None,
        worker: str = "",
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ):
        """Open the store. `worker` names the process among those with the same file, also after a restart."""
        self.max_entries = max_entries
        self._max_bytes = max_bytes
        self._ttl = ttl
        self._worker = worker
        self._clock = clock
        self._lock = threading.Lock()
        try:
            self._database = _open(file)
        except sqlite3.Error as error:
            logger.warning("%s: %s; responses are kept in memory, and each API worker knows its own", file, error)
            self._database = _open(None)

    @property
    def is_enabled(self) -> bool:
        """True if answers are stored at all."""
        return self.max_entries > 0

    def put(self, response_id: str, stored: StoredResponse, *, owner: str) -> None:
        """Store an answer, replacing one with the same id; remove what has expired or exceeds the limits."""
        now = self._clock()
        with self._transaction() as database:
            database.execute(
                "insert or replace into responses (id, owner, number, expires, body, items, num_inputs) "
                "values (?, ?, (select coalesce(max(number), 0) + 1 from responses), ?, ?, ?, ?)",
                (response_id, owner, now + self._ttl, *stored.columns),
            )
            _index(database, response_id, stored)
            self._make_room(database, now)

    def begin(self, response_id: str, stored: StoredResponse, *, owner: str, max_incomplete: int) -> bool:
        """Store an answer that this worker is about to write.

        Returns False, and stores nothing, if the workers are already writing `max_incomplete` answers.
        """
        now = self._clock()
        with self._transaction() as database:
            begun = database.execute(  # one statement, so that it is atomic for other processes
                "insert into responses (id, owner, worker, number, expires, body, items, num_inputs) "
                "select ?, ?, ?, (select coalesce(max(number), 0) + 1 from responses), ?, ?, ?, ? "
                "where (select count(*) from responses where worker is not null) < ?",
                (response_id, owner, self._worker, now + self._ttl, *stored.columns, max_incomplete),
            )
            self._make_room(database, now)
            return begun.rowcount > 0

    def replace(self, response_id: str, stored: StoredResponse, *, is_complete: bool = True) -> None:
        """Update an answer, if it is still stored."""
        now = self._clock()
        with self._transaction() as database:
            database.execute(
                "update responses set body = ?, items = ?, num_inputs = ? where id = ?", (*stored.columns, response_id)
            )
            _index(database, response_id, stored)
            if is_complete:
                database.execute(
                    "update responses set worker = null, expires = ?, "
                    "number = (select max(number) + 1 from responses) where id = ? and worker is not null",
                    (now + self._ttl, response_id),
                )
            self._make_room(database, now)

    def incomplete(self) -> dict[str, StoredResponse]:
        """Return the answers, by id, that this worker or its predecessor has not completed."""
        with self._transaction() as database:
            rows = database.execute(
                "select id, body, items, num_inputs from responses where worker = ?", (self._worker,)
            ).fetchall()
        return {response_id: StoredResponse(*stored) for response_id, *stored in rows}

    def get(self, response_id: str, *, owner: str) -> StoredResponse | None:
        """Return a stored answer, or None if it does not exist or has expired."""
        with self._transaction() as database:
            row = database.execute(
                "select body, items, num_inputs from responses "
                "where id = ? and owner = ? and (expires > ? or worker is not null)",
                (response_id, owner, self._clock()),
            ).fetchone()
        return None if row is None else StoredResponse(*row)

    def find(self, item_id: str, *, owner: str) -> StoredResponse | None:
        """Return the stored answer that has the item, or None."""
        with self._transaction() as database:
            row = database.execute("select response_id from items where id = ?", (item_id,)).fetchone()
        return None if row is None else self.get(row[0], owner=owner)

    def add_events(self, response_id: str, first: int, frames: Sequence[bytes]) -> None:
        """Store events of an answer, if it is still stored; the first of them has the sequence number `first`."""
        with self._transaction() as database:
            database.executemany(
                "insert or ignore into events (response_id, number, frame) select id, ?, ? from responses where id = ?",
                [(number, frame, response_id) for number, frame in enumerate(frames, first)],
            )

    def events(self, response_id: str, first: int) -> list[bytes]:
        """Return the stored events of an answer from the sequence number `first` on."""
        with self._transaction() as database:
            rows = database.execute(
                "select frame from events where response_id = ? and number >= ? order by number", (response_id, first)
            ).fetchall()
        return [frame for (frame,) in rows]

    def delete(self, response_id: str, *, owner: str) -> bool:
        """Delete an answer. Returns true if it existed."""
        with self._transaction() as database:
            deleted = database.execute("delete from responses where id = ? and owner = ?", (response_id, owner))
            return deleted.rowcount > 0

    def cancel(self, response_id: str) -> None:
        """Ask the worker that writes an answer to stop."""
        with self._transaction() as database:
            database.execute("update responses set is_cancelled = 1 where id = ?", (response_id,))

    def is_cancelled(self, response_id: str) -> bool:
        """Return true if `cancel` was called, or the answer was deleted."""
        with self._transaction() as database:
            row = database.execute("select is_cancelled from responses where id = ?", (response_id,)).fetchone()
        return row is None or bool(row[0])

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()

    def _make_room(self, database: sqlite3.Connection, now: float) -> None:
        database.execute("delete from responses where expires <= ? and worker is null", (now,))
        # Keep the newest that fit, after those that are incomplete.
        database.execute(
            "delete from responses where number not in (select number from (select number, "
            "row_number() over newest as position, sum(length(body) + length(items) + "
            "coalesce((select sum(length(frame)) from events where response_id = id), 0)) over newest as bytes "
            "from responses window newest as (order by worker is null, number desc)) "
            "where position <= ? and bytes <= ?)",
            (self.max_entries, self._max_bytes),
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._database as database:
            yield database


def _index(database: sqlite3.Connection, response_id: str, stored: StoredResponse) -> None:
    """Add an answer's items to the index, if it is still stored."""
    database.executemany(
        "insert or ignore into items (id, response_id) select ?, id from responses where id = ?",
        [(item_id, response_id) for item_id in stored.item_ids],
    )


def _open(file: pathlib.Path | None) -> sqlite3.Connection:
    database = sqlite3.connect(":memory:" if file is None else file, check_same_thread=False, timeout=_PATIENCE)
    _write_ahead(database)
    database.execute("pragma foreign_keys = on")
    database.execute("pragma synchronous = off")  # nothing here outlives the server
    database.executescript(_SCHEMA)
    return database


def _write_ahead(database: sqlite3.Connection) -> None:
    """Enable concurrent readers and a writer.

    When several processes do this with a new file, SQLite lets one succeed and refuses the others at once (its busy
    timeout does not apply), so that they retry.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            database.execute("pragma journal_mode = wal")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.005)
        else:
            return
