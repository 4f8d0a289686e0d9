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
"""What a larger body may have of each, texts included. Decoding takes its time by these, not by the bytes, and holds
the interpreter's lock: 8 MiB of text take 6 ms, as many bytes of lists would take half a second, in which nobody is
served; what these limits let pass takes 50 ms of processor time at the most.
"""

VALUES_A_TURN = 64  # tokens with 20 candidates each take 3 ms
VECTORS_A_TURN = 16  # of 4,096 numbers each take 4 ms
AT_ONCE = 2**18  # bytes of an answer up to which it is sent in one piece
_MARK = uuid.uuid4().hex.encode()  # stands for a list that is encoded already: nobody outside knows it


async def read_json[T](request: Request, read: Callable[[bytes], T]) -> T:
    """Return what `read` makes of the request's body, which is JSON. Raises InvalidRequest, naming the field.

    The body must be called JSON: any web page may send what is not, without asking the server first.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType("send the body as 'Content-Type: application/json'")
    return await decode(await request.body(), read, name="the request body")


async def decode[T](body: bytes, read: Callable[[bytes], T], *, name: str) -> T:
    """Return what `read` makes of the JSON `body`, called `name` in errors; of a large one, in a thread.

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
    """A list in an answer that is encoded as it grows: half a million values at once would stop the event loop.

    A struct that is only made to be encoded can have it in the place of a list.
    """

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def extend(self, values: Sequence[object]) -> None:
        """Append `values`."""
        if values:
            encoded = msgspec.json.encode(values)[1:-1]
            self.pieces.append(b",%b" % encoded if self.pieces else encoded)


async def in_turns[T](values: list[T], *, num_a_turn: int = VALUES_A_TURN) -> AsyncGenerator[list[T]]:
    """Take the values off their list, some at a time; others have their turn in the event loop between them."""
    while values:
        taken = values[:num_a_turn]
        del values[:num_a_turn]
        yield taken
        await asyncio.sleep(0)


async def encoded_in_turns(values: list[Any]) -> Any:
    """An EncodedList of `values`, which are used up."""
    encoded = EncodedList()
    async for some in in_turns(values):
        encoded.extend(some)
    return encoded


def encoded(value: object) -> list[bytes]:
    """`value` as JSON, in pieces that are one behind the other. Any list in it may be an EncodedList."""
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
    """`body` with status 200. Any list in it may be an EncodedList."""
    pieces = encoded(body)
    size = sum(len(piece) for piece in pieces)
    if size <= AT_ONCE:
        return Response(b"".join(pieces), media_type="application/json")
    return StreamingResponse(_joined(pieces), headers={"content-length": str(size)}, media_type="application/json")


async def _joined(pieces: Sequence[bytes]) -> AsyncGenerator[bytes]:
    """At least AT_ONCE bytes at a time, in turns with others."""
    joined = bytearray()
    for piece in pieces:
        joined += piece
        if len(joined) >= AT_ONCE:
            yield bytes(joined)
            joined.clear()
            await asyncio.sleep(0)
    yield bytes(joined)
