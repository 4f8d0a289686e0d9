"""Bad requests: what they have in common, on the wire and in their answers.

A kind of bad request is a list of requests with their answers (`fault_tables`), or an act that takes time
(`fault_acts`).
"""

import asyncio
import contextlib
import json
import socket
import struct
from typing import NamedTuple

from waiting import PATIENCE

KEY = "the-key"
COMPLETIONS, CHAT, EMBEDDINGS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses"
USER = {"role": "user", "content": "hello"}
GOOD = {
    COMPLETIONS: {"prompt": "hello", "max_tokens": 4},
    CHAT: {"messages": [USER], "max_tokens": 4},
    EMBEDDINGS: {"input": "hello"},
    RESPONSES: {"input": "hello", "max_output_tokens": 4},
}
INPUT = {COMPLETIONS: "prompt", CHAT: "messages", EMBEDDINGS: "input", RESPONSES: "input"}
BODY_LIMIT = 2**20
RECEIVE_TIMEOUT = 10.0  # a good request is read in it, even where the server and its clients are held up


class Answer(NamedTuple):
    """An answer; status 0 if the connection was closed without one."""

    status: int
    headers: dict[str, str]
    body: bytes


class _Reader(asyncio.StreamReader):
    """A reader whose data can be read even after the connection was reset."""

    def set_exception(self, exc):
        self.feed_eof()


class Wire:
    """One connection, written byte by byte."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, address):
        loop = asyncio.get_running_loop()
        reader = _Reader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.create_connection(lambda: protocol, *address)
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    async def send(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self):
        async with asyncio.timeout(PATIENCE):
            try:
                head = await self.reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return Answer(0, {}, b"")
            status, *lines = head.decode("latin-1").strip().split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            body = b""
            if "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            return Answer(int(status.split()[1]), headers, body)

    def close(self):
        self.writer.close()

    def reset(self):
        """Close without a good-bye: the other side gets an RST."""
        connection = self.writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class Sent(NamedTuple):
    """Bytes on the wire, and the answer: one of the statuses, and the field that it blames. 0: none at all."""

    data: bytes
    status: int | tuple[int, ...] = 400
    param: str | None = None

    async def act(self, wire):
        with contextlib.suppress(ConnectionError):  # the server may have answered, and read no further
            await wire.send(self.data)
        answer = await wire.answer()
        statuses = self.status if isinstance(self.status, tuple) else (self.status,)
        assert answer.status in statuses, answer
        assert (answer.status == 405) == bool(answer.headers.get("allow")), answer
        if answer.status:
            error = json.loads(answer.body)["error"]
            is_anthropic = b" /v1/messages" in self.data.partition(b"\r\n")[0]
            assert set(error) == {"message", "type", "param"} | (set() if is_anthropic else {"code"})
            assert error["param"] == self.param, error
            assert "Traceback" not in error["message"]


def head(method, path, headers=(), *, key=KEY):
    lines = [f"{method} {path} HTTP/1.1", "host: test", f"authorization: Bearer {key}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def post(path, content, headers=()):
    """Return a request with this body: bytes, or a value that is encoded as JSON."""
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    return head("POST", path, [*JSON, ("content-length", len(content)), *headers]) + content


JSON = (("content-type", "application/json"),)
