"""Bodies: JSON in, checked against a struct; a struct out as JSON."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from jaxserve.errors import InvalidRequest, UnsupportedMediaType

COUNTED_FROM = 2**20  # bytes of a body
MAX_PARTS = {b"{": 2**17, b"[": 2**17, b'":': 2**18, b",": 2**20}
"""Limits of each part in a larger body, counted inside texts too.

Decoding time depends on these rather than on bytes, and decoding holds the interpreter's lock: 8 MiB of text take 6 ms,
as many bytes of lists would block all other requests for half a second. Bodies within these limits take at most 50 ms
of CPU time.
"""

VALUES_A_TURN = 64  # tokens with 20 candidates each take 3 ms
VECTORS_A_TURN = 16  # of 4,096 numbers each take 4 ms
AT_ONCE = 2**18  # bytes of an answer up to which it is sent in one piece
_MARK = uuid.uuid4().hex.encode()  # placeholder of an encoded list; clients cannot know it


async def read_json[T](request: Request, read: Callable[[bytes], T]) -> T:
    """Return what `read` makes of the request's JSON body. Raises InvalidRequest, naming the field.

    The body must be declared as JSON: any web page may send other types without asking the server first.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType("send the body as 'Content-Type: application/json'")
    return await decode(await request.body(), read, name="the request body")


async def decode[T](body: bytes, read: Callable[[bytes], T], *, name: str) -> T:
    """Return what `read` makes of the JSON `body`, called `name` in errors; a large one is decoded in a thread.

    Raises InvalidRequest, also for more than MAX_PARTS.
    """
    if len(body) <= COUNTED_FROM:
        return read(body)
    return await asyncio.to_thread(_decode_large, body, read, name)


def _decode_large[T](body: bytes, read: Callable[[bytes], T], name: str) -> T:
    for part, limit in MAX_PARTS.items():
        if body.count(part) > limit:
            raise InvalidRequest(f"{name} has more than {limit} {part.decode()!r}", code="too_many_parts")
    return read(body)


class EncodedList:
    """A list of an answer that is encoded as it grows: encoding half a million values at once would block the event
    loop.

    It can replace a list in a struct that is only made to be encoded.
    """

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def extend(self, values: Sequence[object]) -> None:
        """Append `values`."""
        if values:
            encoded = msgspec.json.encode(values)[1:-1]
            self.pieces.append(b",%b" % encoded if self.pieces else encoded)


async def in_turns[T](values: list[T], *, num_a_turn: int = VALUES_A_TURN) -> AsyncGenerator[list[T]]:
    """Yield the values in batches, removing them from their list and giving other tasks a turn in between."""
    while values:
        taken = values[:num_a_turn]
        del values[:num_a_turn]
        yield taken
        await asyncio.sleep(0)


async def encoded_in_turns(values: list[Any]) -> Any:
    """Return an EncodedList of `values`, which is emptied."""
    encoded = EncodedList()
    async for some in in_turns(values):
        encoded.extend(some)
    return encoded


def encoded(value: object) -> list[bytes]:
    """Encode `value` as JSON, in consecutive pieces. Any list in it may be an EncodedList."""
    lists: list[EncodedList] = []

    def mark(part: object) -> msgspec.Raw:
        assert isinstance(part, EncodedList), part
        lists.append(part)
        return msgspec.Raw(_MARK)

    whole = msgspec.json.encode(value, enc_hook=mark)
    if not lists:
        return [whole]
    first, *others = whole.split(_MARK)
    pieces = [first]
    for each, rest in zip(lists, others, strict=True):
        pieces += [b"[", *each.pieces, b"]%b" % rest]
    return pieces


def json_response(body: msgspec.Struct) -> Response:
    """Return a response of status 200 with `body`. Any list in it may be an EncodedList."""
    pieces = encoded(body)
    size = sum(len(piece) for piece in pieces)
    if size <= AT_ONCE:
        return Response(b"".join(pieces), media_type="application/json")
    return StreamingResponse(_joined(pieces), headers={"content-length": str(size)}, media_type="application/json")


async def _joined(pieces: Sequence[bytes]) -> AsyncGenerator[bytes]:
    """Yield at least AT_ONCE bytes at a time, giving other tasks a turn in between."""
    joined = bytearray()
    for piece in pieces:
        joined += piece
        if len(joined) >= AT_ONCE:
            yield bytes(joined)
            joined.clear()
            await asyncio.sleep(0)
    yield bytes(joined)
