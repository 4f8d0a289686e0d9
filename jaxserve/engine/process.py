"""The engine's process: the other side of `remote`. The server's parent starts `python -m jaxserve.engine.process`.

The engine runs in a thread, as in LocalEngineClient, and sends each client its outputs of a step as one message. The
main thread reads the clients' messages and sends the stats; it never waits for a step.
"""

import collections
import contextlib
import faulthandler
import logging
import pathlib
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from jaxserve import logs
from jaxserve.config import EngineConfig
from jaxserve.engine import wire
from jaxserve.engine.client import EngineClient, EngineStats
from jaxserve.engine.early import start_early, wake_devices
from jaxserve.engine.subprocesses import GRACE_SECONDS, Parent, run_child
from jaxserve.errors import JaxserveError
from jaxserve.request import EngineOutput, EngineRequest, Refusal

logger = logging.getLogger("jaxserve.engine.process")  # it is the process's __main__

STATS_INTERVAL = 0.1
"""Seconds between two snapshots for the clients while there is something new, ten times that while there is not."""

POLL_MILLISECONDS = 50
MAX_MESSAGES = 100  # messages read before anything else is done, so that the stats are sent even if many arrive
LINGER_SECONDS = 2
"""Maximum seconds for the notice of the engine's death to reach its clients."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The parent's settings for the engine's process: its options, the folder of the sockets, and its name in the log
    if there are several engines.
    """

    engine: EngineConfig
    folder: str
    log_level: str
    log_format: logs.Format
    log_name: str | None = None


class _Peer:
    """One client: its socket, and its running requests. Both the engine's thread and the main thread send to it."""

    def __init__(self, name: str, socket: zmq.Socket[bytes], client: EngineClient):
        self.name = name
        self.unfinished: set[str] = set()
        self._socket = socket
        self._client = client
        self._knows_of_death = False
        self._lock = threading.Lock()  # a ZMQ socket may change threads, but not serve two at once

    def send(self, message: wire.ToClient) -> None:
        """Send a message, or queue it if the client is behind: the engine never waits for a client."""
        data = wire.encode(message)
        with self._lock:
            if not self._socket.closed:
                self._socket.send(data, zmq.NOBLOCK)

    def take(self, outputs: list[EngineOutput]) -> None:
        """Send outputs to this client; the sink of all its requests."""
        ended = [output.request_id for output in outputs if output.finish_reason is not None]
        self.unfinished.difference_update(ended)
        if not self._knows_of_death and not self._client.is_alive():
            self._knows_of_death = True
            self.send(wire.Died(outputs[0].error or "it is closed"))
        if ended and not (stats := self._client.stats()).num_running:
            self.send(wire.Stats(stats))  # the receiver of the last answer must see that nothing runs
        self.send(wire.Outputs(outputs))

    def close(self, *, linger_seconds: int) -> None:
        with self._lock:
            self._socket.close(linger=linger_seconds * 1000)


class EngineServer:
    """Serves one EngineClient, of any kind, to the clients that say Hello in `folder`."""

    def __init__(
        self, client: EngineClient, folder: pathlib.Path, *, on_death: Callable[[str], None] = lambda _reason: None
    ):
        """`on_death` is called with the reason when the engine has died."""
        self._client = client
        self._on_death = on_death
        self._folder = folder
        self._peers: dict[str, _Peer] = {}
        self._gone: collections.deque[str] = collections.deque()
        self._is_stopping = threading.Event()
        self._context = zmq.Context()
        self._incoming = self._context.socket(zmq.PULL)
        self._incoming.set_hwm(0)
        self._incoming.bind(wire.engine_address(folder))
        self._stats: EngineStats | None = None
        self._stats_sent = 0.0

    def run(self) -> bool:
        """Serve until `stop`, or the engine's death. Returns whether the engine was alive to the end."""
        while not self._is_stopping.is_set() and self._client.is_alive():
            if self._incoming.poll(POLL_MILLISECONDS):
                with contextlib.suppress(zmq.Again):
                    for _ in range(MAX_MESSAGES):
                        self._handle(wire.decode_to_engine(self._incoming.recv(zmq.NOBLOCK)))
            while self._gone:
                self._forget(self._gone.popleft())
            self._send_stats()
        is_alive = self._client.is_alive()
        if not is_alive:
            reason = self._reason()
            for peer in self._peers.values():
                peer.send(wire.Died(reason))  # those without requests have not heard of it
            self._on_death(reason)
        self._client.close()
        for peer in self._peers.values():
            peer.close(linger_seconds=0 if is_alive else LINGER_SECONDS)
        self._incoming.close(linger=0)
        self._context.term()
        return is_alive

    def _reason(self) -> str:
        """Return why the engine has died."""
        try:
            self._client.snapshot()
        except Exception as error:
            return str(error)
        return "the engine has stopped"

    def stop(self) -> None:
        """End `run`; from any thread."""
        self._is_stopping.set()

    def client_gone(self, name: str) -> None:
        """Abort the requests of a client whose process has ended. Thread-safe."""
        self._gone.append(name)

    def _handle(self, message: wire.ToEngine) -> None:
        peer = self._peers.get(message.client)
        if isinstance(message, wire.Hello):
            socket = self._context.socket(zmq.PUSH)
            socket.set_hwm(0)  # the unread data of a slow client is bounded by the max_tokens of its requests
            socket.connect(wire.client_address(self._folder, message.client))
            peer = self._peers[message.client] = _Peer(message.client, socket, self._client)
            peer.send(wire.Welcome(self._client.info))
            peer.send(wire.Stats(self._client.stats()))
            return
        if peer is None:
            return  # it has ended, but its last words came later
        match message:
            case wire.Submit(requests=requests, chunks=chunks):
                self._submit(peer, requests)
                for other in self._peers.values() if chunks else ():
                    if other is not peer:
                        other.send(wire.Placed(chunks, self._num_others(other)))
            case wire.Abort(request_ids=request_ids):
                peer.unfinished.difference_update(request_ids)
                self._client.abort(request_ids)
            case wire.Call():
                threading.Thread(target=self._call, args=(peer, message), daemon=True).start()

    def _submit(self, peer: _Peer, requests: list[EngineRequest]) -> None:
        ids = [request.request_id for request in requests]
        peer.unfinished.update(ids)  # before: they may finish while `submit` returns
        try:
            self._client.submit(requests, peer.take)
        except JaxserveError as error:
            refusal = Refusal.of(error)
            peer.take(
                [EngineOutput(request_id=i, finish_reason="error", error=str(error), refusal=refusal) for i in ids]
            )

    def _call(self, peer: _Peer, call: wire.Call) -> None:
        """Answer a call, in a thread of its own because it waits for a step."""
        methods: dict[wire.Method, Callable[..., object]] = {
            "reset_prefix_cache": self._client.reset_prefix_cache,
            "start_profile": self._client.start_profile,
            "stop_profile": self._client.stop_profile,
            "snapshot": self._client.snapshot,
        }
        try:
            peer.send(wire.Answer(call.number, methods[call.method](*call.arguments)))
        except JaxserveError as error:
            peer.send(wire.Answer(call.number, None, Refusal.of(error)))
        except Exception as error:  # otherwise the caller would wait forever
            logger.exception("%s has failed", call.method)
            peer.send(wire.Answer(call.number, None, Refusal.of(JaxserveError(f"{call.method}: {error}"))))

    def _forget(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None:
            logger.warning("client %s is gone: %d of its requests are aborted", name, len(peer.unfinished))
            self._client.abort(list(peer.unfinished))
            peer.close(linger_seconds=0)

    def _send_stats(self) -> None:
        now = time.monotonic()
        stats = self._client.stats()
        if now - self._stats_sent >= (10 * STATS_INTERVAL if stats == self._stats else STATS_INTERVAL):
            self._stats, self._stats_sent = stats, now
            wire.heartbeat_file(self._folder).touch()
            for peer in self._peers.values():
                peer.send(wire.Stats(stats))
                peer.send(wire.Placed([], self._num_others(peer)))

    def _num_others(self, peer: _Peer) -> int:
        return sum(len(other.unfinished) for other in self._peers.values() if other is not peer)


def serve(parent: Parent, client: EngineClient, folder: pathlib.Path, *, end_seconds: float = GRACE_SECONDS) -> int:
    """Serve `client` until the parent closes this process or the engine dies. Returns the exit code.

    After the engine's death the process ends within `end_seconds`: the exit of one whose device hangs would hang too.
    """
    server = EngineServer(client, folder, on_death=parent.answer)

    def on_command(command: str) -> None:
        word, _, name = command.partition(" ")
        if word == "gone":
            server.client_gone(name)

    parent.on_command, parent.on_end = on_command, server.stop
    parent.answer()
    if server.run():
        return 0
    faulthandler.dump_traceback_later(end_seconds, exit=True)
    return 1


def _main(parent: Parent) -> int:
    settings = parent.settings(Settings)
    parent.folder = settings.folder
    logs.configure(settings.log_level, settings.log_format, in_background=True, process_name=settings.log_name)
    workers = start_early(settings.engine)
    wake_devices(settings.engine)
    from jaxserve.engine.local import LocalEngineClient

    client = LocalEngineClient.start(settings.engine, progress=True, workers=workers, owns_process=True)
    return serve(parent, client, pathlib.Path(settings.folder))


if __name__ == "__main__":
    sys.exit(run_child(_main))
