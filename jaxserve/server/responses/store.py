"""Answers of /v1/responses that later turns may refer to: bounded in number, bytes and time.

SQLite, so that all workers of a server see the same: in a file of their private folder, or in memory. The file goes
with the server.
"""

import contextlib
import logging
import pathlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

logger = logging.getLogger(__name__)

MAX_BYTES = 256 * 2**20
"""All bodies and conversations together; the oldest go first."""

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
    place text  -- of the worker that still writes it; null when it is complete
);
create index if not exists by_number on responses (number);
create table if not exists items (
    id text primary key,
    response_id text not null references responses (id) on delete cascade
);
create index if not exists by_response on items (response_id);
"""


class StoredResponse(NamedTuple):
    """`body` is the answer's JSON; `items` that of the conversation up to and with the answer, of which the first
    `num_inputs` are the input.
    """

    body: bytes
    items: bytes
    num_inputs: int
    item_ids: tuple[str, ...] = ()
    """Ids of the answer's own items, which are found by them; left out of what is read."""

    @property
    def columns(self) -> tuple[bytes, bytes, int]:
        """What the table of responses has of it."""
        return self.body, self.items, self.num_inputs


class ResponseStore:
    """At most `max_entries` answers, each for `ttl` seconds. From any thread, and from several processes at once.

    The oldest go first; those that are still written go last, and their time begins when they are complete.

    Where the file cannot be written, its disk being full, say, the methods raise sqlite3.Error.

    Nobody but its `owner` (the name of an API key) can read an answer or delete it: for others it is not there.
    """

    def __init__(
        self,
        *,
        max_entries: int,
        ttl: float,
        file: pathlib.Path | None = None,
        place: str = "",
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ):
        """`place` is the worker's among those that share the file; whoever is started in its stead has the same."""
        self.max_entries = max_entries
        self._max_bytes = max_bytes
        self._ttl = ttl
        self._place = place
        self._clock = clock
        self._lock = threading.Lock()
        try:
            self._database = _open(file)
        except sqlite3.Error as error:
            logger.warning("%s: %s; responses are kept in memory, and each API worker knows its own", file, error)
            self._database = _open(None)

    @property
    def is_enabled(self) -> bool:
        """Whether anything is kept at all."""
        return self.max_entries > 0

    def put(self, response_id: str, stored: StoredResponse, *, owner: str) -> None:
        """Keep an answer, instead of what was kept by this id; what is too old or too much goes."""
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
        """Keep an answer that this worker is about to write. Returns False, and keeps nothing, where `max_incomplete`
        are being written already, by whichever worker.
        """
        now = self._clock()
        with self._transaction() as database:
            begun = database.execute(  # one statement: other processes see all of it or nothing
                "insert into responses (id, owner, place, number, expires, body, items, num_inputs) "
                "select ?, ?, ?, (select coalesce(max(number), 0) + 1 from responses), ?, ?, ?, ? "
                "where (select count(*) from responses where place is not null) < ?",
                (response_id, owner, self._place, now + self._ttl, *stored.columns, max_incomplete),
            )
            self._make_room(database, now)
            return begun.rowcount > 0

    def replace(self, response_id: str, stored: StoredResponse, *, is_complete: bool = True) -> None:
        """What has become of an answer, if it is still kept."""
        now = self._clock()
        with self._transaction() as database:
            database.execute(
                "update responses set body = ?, items = ?, num_inputs = ? where id = ?", (*stored.columns, response_id)
            )
            _index(database, response_id, stored)
            if is_complete:
                database.execute(
                    "update responses set place = null, expires = ?, "
                    "number = (select max(number) + 1 from responses) where id = ? and place is not null",
                    (now + self._ttl, response_id),
                )
            self._make_room(database, now)

    def incomplete(self) -> dict[str, StoredResponse]:
        """By id, what this worker, or one before it in its place, has not completed."""
        with self._transaction() as database:
            rows = database.execute(
                "select id, body, items, num_inputs from responses where place = ?", (self._place,)
            ).fetchall()
        return {response_id: StoredResponse(*stored) for response_id, *stored in rows}

    def get(self, response_id: str, *, owner: str) -> StoredResponse | None:
        """A stored answer. None: it is not there, or not any more."""
        with self._transaction() as database:
            row = database.execute(
                "select body, items, num_inputs from responses "
                "where id = ? and owner = ? and (expires > ? or place is not null)",
                (response_id, owner, self._clock()),
            ).fetchone()
        return None if row is None else StoredResponse(*row)

    def find(self, item_id: str, *, owner: str) -> StoredResponse | None:
        """The stored answer that has the item. None: it is not there, or not any more."""
        with self._transaction() as database:
            row = database.execute("select response_id from items where id = ?", (item_id,)).fetchone()
        return None if row is None else self.get(row[0], owner=owner)

    def delete(self, response_id: str, *, owner: str) -> bool:
        """Forget an answer. Returns whether it was there."""
        with self._transaction() as database:
            deleted = database.execute("delete from responses where id = ? and owner = ?", (response_id, owner))
            return deleted.rowcount > 0

    def cancel(self, response_id: str) -> None:
        """Ask whoever works on it to stop."""
        with self._transaction() as database:
            database.execute("update responses set is_cancelled = 1 where id = ?", (response_id,))

    def is_cancelled(self, response_id: str) -> bool:
        """Whether `cancel` has been called, or the answer has been deleted: nobody wants it then either."""
        with self._transaction() as database:
            row = database.execute("select is_cancelled from responses where id = ?", (response_id,)).fetchone()
        return row is None or bool(row[0])

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()

    def _make_room(self, database: sqlite3.Connection, now: float) -> None:
        database.execute("delete from responses where expires <= ? and place is null", (now,))
        # The newest that fit, counted from the end, behind those that are still written.
        database.execute(
            "delete from responses where number not in (select number from (select number, "
            "row_number() over newest as position, sum(length(body) + length(items)) over newest as bytes "
            "from responses window newest as (order by place is null, number desc)) "
            "where position <= ? and bytes <= ?)",
            (self.max_entries, self._max_bytes),
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._database as database:
            yield database


def _index(database: sqlite3.Connection, response_id: str, stored: StoredResponse) -> None:
    """Let the items of an answer be found, if it is still kept."""
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
    """Readers and a writer at once. Of those that begin with a new file together, SQLite lets one do so and refuses
    the others at once, however patient they are elsewhere (its busy timeout does not count here).
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
