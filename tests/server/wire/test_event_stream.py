"""EventStream over a connection that accepts nothing for a while: the order of what is sent, and every kind of end."""

import asyncio
import json
import random

import pytest
from waiting import PATIENCE

from jaxserve.errors import Draining, RequestFailed
from jaxserve.server.wire.http import WRITE_CHUNK
from jaxserve.server.wire.streaming import DONE, EventStream, SlowReaders


class Connection:
    """Takes bytes while `takes` is set; the client is there until `is_gone` is."""

    def __init__(self):
        self.messages = []
        self.takes = asyncio.Event()
        self.takes.set()
        self.is_gone = asyncio.Event()
        self.num_sending = 0

    @property
    def body(self):
        assert [message["type"] for message in self.messages[:1]] == ["http.response.start"]
        assert all(message["type"] == "http.response.body" for message in self.messages[1:])
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def is_complete(self):
        return [message.get("more_body", True) for message in self.messages] == [True] * (len(self.messages) - 1) + [
            False
        ]

    async def send(self, message):
        self.num_sending += 1
        assert self.num_sending == 1, "two write at once"
        try:
            await self.takes.wait()
            self.messages.append(message)
        finally:
            self.num_sending -= 1

    def write(self, data):
        if self.takes.is_set():
            self.messages.append({"type": "http.response.body", "body": data})
        return self.takes.is_set()

    async def receive(self):
        await self.is_gone.wait()
        return {"type": "http.disconnect"}


def answer(connection, work, *, stopping=None, is_direct=True, slow_readers=None):
    """Return a task that sends what `work` writes."""
    extensions = {WRITE_CHUNK: {"write": connection.write}} if is_direct else {}
    stream = EventStream(work, slow_readers=slow_readers or SlowReaders(), stopping=stopping or asyncio.Event())
    return asyncio.create_task(stream({"extensions": extensions}, connection.receive, connection.send))


async def turns(number=5):
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("seed", range(5))
async def test_frames_keep_their_order_however_often_the_connection_stops(seed, is_direct):
    chance = random.Random(seed)
    frames = [b"%d;" % number for number in range(200)]
    connection = Connection()

    async def work(write):
        for frame in frames:
            write(frame)
            if chance.random() < 0.3:
                (connection.takes.set if chance.random() < 0.5 else connection.takes.clear)()
            await turns(chance.choice([0, 0, 1, 4]))

    running = answer(connection, work, is_direct=is_direct)
    while not running.done():
        await turns(chance.choice([1, 50]))
        connection.takes.set()
    await running
    assert connection.body == b"".join(frames) + DONE
    assert connection.is_complete


@pytest.mark.parametrize("is_direct", [True, False])
async def test_work_can_wait_until_its_frames_are_taken(monkeypatch, is_direct):
    """A reader who is slow, but reads, then loses nothing, however large the frames are."""
    monkeypatch.setattr("jaxserve.server.wire.streaming.MAX_HELD_BYTES", 0)
    connection, num_written = Connection(), 0

    async def work(write):
        nonlocal num_written
        await write.drain()
        for number in range(10):
            write(b"%d;" % number)
            num_written += 1
            await write.drain()

    running = answer(connection, work, is_direct=is_direct)
    for _ in range(12):
        connection.takes.clear()
        await turns(20)
        assert num_written <= max(0, len(connection.messages) - 1) + 1
        connection.takes.set()
        await turns(1)
    await running
    assert connection.body == b"".join(b"%d;" % number for number in range(10)) + DONE


async def test_work_does_not_wait_for_a_connection_that_fails():
    connection = Connection()

    async def send(message):
        await turns()
        raise ConnectionError("it is broken")

    async def work(write):
        write(b"a")
        for _ in range(3):
            await write.drain()
            write(b"b")

    connection.send = send
    with pytest.raises(ConnectionError, match="broken"):
        await asyncio.wait_for(answer(connection, work, is_direct=False), PATIENCE)


@pytest.mark.parametrize("num_sent", [0, 1])
async def test_a_client_that_leaves_while_frames_are_held(num_sent):
    connection, is_cancelled = Connection(), asyncio.Event()

    async def work(write):
        try:
            for number in range(3):
                if number == num_sent:
                    connection.takes.clear()
                write(b"frame")
                await turns()
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()

    running = answer(connection, work)
    await turns(50)
    connection.is_gone.set()
    await running
    assert is_cancelled.is_set()
    assert connection.num_sending == 0
    messages = connection.messages
    assert len(messages) == (2 if num_sent else 0)


async def test_what_waits_for_a_slow_reader_is_bounded(monkeypatch):
    """Waiting frames are dropped, and an error is sent instead as soon as the reader accepts something."""
    monkeypatch.setattr("jaxserve.server.wire.streaming.MAX_HELD_BYTES", 10)
    connection, written = Connection(), []

    async def work(write):
        write(b"first;")
        await turns()
        connection.takes.clear()
        while True:
            write(b"frame;")
            written.append(b"frame;")
            await turns()

    running = answer(connection, work)
    await turns(100)
    assert not running.done()
    assert len(written) == 2
    connection.takes.set()
    await running
    assert connection.is_complete
    error = json.loads(connection.body.removeprefix(b"first;data: ").removesuffix(b"\n\n" + DONE))["error"]
    assert error["code"] == "request_failed"
    assert "too slowly: more than 10 bytes" in error["message"]


@pytest.mark.parametrize("phase", ["writing", "written", "failing"])
async def test_what_waits_for_all_slow_readers_is_bounded(monkeypatch, phase):
    """The stream of which most waits ends, whatever it is at; the others go on. Its reader gets the error."""
    monkeypatch.setattr("jaxserve.server.wire.streaming.MAX_ALL_HELD_BYTES", 100)
    slow_readers = SlowReaders()
    connections = {name: Connection() for name in ("large", "small", "last")}
    may_go_on, is_cancelled = asyncio.Event(), asyncio.Event()

    def work_of(name, frames):
        async def work(write):
            write(b"first;")
            await turns()
            connections[name].takes.clear()
            for frame in frames:
                write(frame)
            await turns()  # so that it is being sent
            if name == "last":
                await may_go_on.wait()
                write(b"l" * 40)
                write(b"too much")
            elif name == "large" and phase == "failing":
                raise RequestFailed("NaN")
            elif name == "large" and phase == "writing":
                try:
                    await asyncio.Event().wait()
                finally:
                    is_cancelled.set()

        return work

    running = {
        name: answer(connections[name], work_of(name, frames), slow_readers=slow_readers)
        for name, frames in {"large": [b"x" * 30] * 2, "small": [b"s" * 20], "last": []}.items()
    }
    await turns(50)
    may_go_on.set()
    await turns(50)
    assert is_cancelled.is_set() == (phase == "writing")
    assert not any(task.done() for task in running.values())
    held = {stream.num_held_bytes for stream in slow_readers._streams if stream.num_held_bytes < 100}
    assert {20, 48} <= held
    for connection in connections.values():
        connection.takes.set()
    for task in running.values():
        await task
    assert (slow_readers._num_held_bytes, slow_readers._streams) == (0, set())
    assert all(connection.is_complete for connection in connections.values())
    bodies = {name: connection.body for name, connection in connections.items()}
    assert bodies["small"] == b"first;" + b"s" * 20 + DONE
    assert bodies["last"] == b"first;" + b"l" * 40 + b"too much" + DONE
    error = json.loads(bodies["large"].removeprefix(b"first;data: ").removesuffix(b"\n\n" + DONE))["error"]
    assert error["code"] == "request_failed"
    expected = "NaN" if phase == "failing" else "the stream is read too slowly: of all streams more than 100 bytes"
    assert error["message"].startswith(expected)


async def test_what_waited_for_a_client_that_has_left_counts_no_more():
    connection, slow_readers = Connection(), SlowReaders()

    async def work(write):
        connection.takes.clear()
        write(b"frame")
        await asyncio.Event().wait()

    running = answer(connection, work, slow_readers=slow_readers)
    await turns(50)
    assert slow_readers._num_held_bytes == 5
    connection.is_gone.set()
    await running
    assert (slow_readers._num_held_bytes, slow_readers._streams) == (0, set())


async def test_what_a_slow_reader_has_not_asked_for_stays_counted(monkeypatch):
    """A connection that takes something once must not get all that is held: it would hold that, uncounted."""
    monkeypatch.setattr("jaxserve.server.wire.streaming.MAX_SENT_BYTES", 20)
    connection, slow_readers, takes_once, seen = Connection(), SlowReaders(), asyncio.Event(), []

    async def send(message):
        await connection.send(message)
        if takes_once.is_set():
            connection.takes.clear()

    async def work(write):
        write(b"first;")
        await turns()
        connection.takes.clear()
        for _ in range(10):
            write(b"frame;")
        await turns()
        takes_once.set()
        connection.takes.set()
        await turns(20)
        seen.append((connection.body, slow_readers._num_held_bytes))
        takes_once.clear()
        connection.takes.set()

    stream = EventStream(work, slow_readers=slow_readers, stopping=asyncio.Event())
    await stream({"extensions": {WRITE_CHUNK: {"write": connection.write}}}, connection.receive, send)
    assert seen == [(b"first;" + b"frame;" * 4, 6 * len(b"frame;"))]
    assert (slow_readers._num_held_bytes, slow_readers._streams) == (0, set())
    assert connection.body == b"first;" + b"frame;" * 10 + DONE


async def test_one_long_frame_is_no_slow_reader(monkeypatch):
    monkeypatch.setattr("jaxserve.server.wire.streaming.MAX_HELD_BYTES", 10)
    connection = Connection()

    async def work(write):
        connection.takes.clear()
        write(b"a")
        write(b"b" * 100)
        await turns()
        connection.takes.set()
        await turns()
        for _ in range(100):
            write(b"c")

    await answer(connection, work)
    assert connection.body == b"a" + b"b" * 100 + b"c" * 100 + DONE


@pytest.mark.parametrize("why", ["failure", "bug", "stopping"])
async def test_an_error_comes_behind_what_is_held(why, caplog):
    connection, stopping = Connection(), asyncio.Event()

    async def work(write):
        write(b"a")
        await turns()
        connection.takes.clear()
        write(b"b")
        await turns()
        write(b"c")
        if why == "stopping":
            stopping.set()
            await asyncio.Event().wait()
        raise RequestFailed("NaN") if why == "failure" else ZeroDivisionError("a secret")

    running = answer(connection, work, stopping=stopping)
    await turns(50)
    assert not running.done()
    connection.takes.set()
    await running
    assert connection.is_complete
    assert connection.body.startswith(b"abcdata: ")
    assert connection.body.endswith(b"\n\n" + DONE)
    error = json.loads(connection.body.removeprefix(b"abcdata: ").removesuffix(b"\n\n" + DONE))["error"]
    kinds = {"failure": "internal_error", "bug": "internal_error", "stopping": "service_unavailable_error"}
    assert error["type"] == kinds[why]
    assert "secret" not in error["message"]
    assert ("a secret" in caplog.text) == (why == "bug")


@pytest.mark.parametrize("error", [RequestFailed("NaN"), None])
async def test_what_fails_before_the_first_frame_is_raised(error):
    connection, stopping = Connection(), asyncio.Event()

    async def work(_write):
        await turns()
        if error is not None:
            raise error
        stopping.set()
        await asyncio.Event().wait()

    with pytest.raises(Draining if error is None else RequestFailed):
        await answer(connection, work, stopping=stopping)
    assert connection.messages == []
