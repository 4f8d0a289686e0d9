"""The messages between the engine's process and its clients: msgspec structs as msgpack, over ZMQ on Unix sockets.

The engine reads `engine.sock` in a private folder; each client reads a socket of its own there, named after itself. No
pickle: a message that is not one of these structs is refused by the decoder.
"""

import pathlib
from typing import Any, Literal

import msgspec

from jaxserve.engine.client import EngineInfo, EngineStats
from jaxserve.request import EngineOutput, EngineRequest, Refusal

Method = Literal["reset_prefix_cache", "start_profile", "stop_profile", "snapshot"]


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Sent by a client that reads its socket; answered by Welcome as soon as the engine runs."""

    client: str


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`EngineClient.submit`: all of `requests`, or none: then each gets an output with the refusal.

    `chunks` are those of each prompt (`router.prompt_chunks`) for the other clients, if there are several engines.
    """

    client: str
    requests: list[EngineRequest]
    chunks: list[list[bytes]] = []


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The arguments of `EngineClient.abort`."""

    client: str
    request_ids: list[str]


class Call(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One of the rare calls of an EngineClient that have an answer; `number` is repeated in it."""

    client: str
    number: int
    method: Method
    arguments: list[str] = []


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine runs."""

    info: EngineInfo


class Outputs(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All that one step has for the requests of one client."""

    outputs: list[EngineOutput]


class Stats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine's snapshot, every so often: its heartbeat too."""

    stats: EngineStats


class Placed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Other clients have sent prompts with these chunks, and have `num_others` requests that have not ended."""

    chunks: list[list[bytes]]
    num_others: int


class Answer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The result of a Call, or the reason why it failed."""

    number: int
    value: Any = None
    refusal: Refusal | None = None


class Died(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine's loop has ended with an error; the last outputs of its requests follow, then the process ends."""

    reason: str


type ToEngine = Hello | Submit | Abort | Call
type ToClient = Welcome | Outputs | Stats | Placed | Answer | Died

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode


def engine_address(folder: pathlib.Path) -> str:
    """Return the ZMQ address that the engine reads."""
    return f"ipc://{folder / 'engine.sock'}"


def heartbeat_file(folder: pathlib.Path) -> pathlib.Path:
    """Return the file that the engine's process touches every second, while it is not stuck."""
    return folder / "heartbeat"


def client_address(folder: pathlib.Path, client: str) -> str:
    """Return the ZMQ address that this client reads."""
    return f"ipc://{folder / client}.sock"
