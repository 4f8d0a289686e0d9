"""An OpenAI-compatible server that plays scripts with known timing: for tests of the HTTP load client.

`from scripted_server import ...`. Raw asyncio streams in a thread of their own: nothing of jaxserve serves here.
"""

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from waiting import PATIENCE, until


@dataclasses.dataclass(kw_only=True)
class Reply:
    """After `ttft` seconds, `num_tokens` chunks `gap` seconds apart; or `status` with `body`, or something broken.

    Nothing is sent before `may_begin`.
    """

    num_tokens: int = 3
    ttft: float = 0.0
    gap: float = 0.0
    status: int = 200
    body: str = '{"error": {"message": "refused by script"}}'
    has_usage: bool = True
    has_text: bool = True
    cut_after: int | None = None  # chunks, then the connection is closed
    error_after: int | None = None  # chunks, then an error event
    hangs: bool = False
    may_begin: Callable[[], bool] = lambda: True


class ScriptedServer:
    """`reply(path, body)` says what to do; `requests` are the (headers, path, body) that came; `sleep` passes time."""

    def __init__(self, reply: Callable[[str, dict[str, Any]], Reply], models: list[dict[str, Any]] | None):
        self.reply = reply
        self.models = models
        self.requests: list[tuple[dict[str, str], str, dict[str, Any]]] = []
        self.num_open = self.max_open = 0
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()], daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(PATIENCE)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE)
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._stop.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while await self._answer(reader, writer):
                pass
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        path = head[0].split(" ")[1]
        body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or "{}")
        self.requests.append((headers, path, body))
        if path == "/v1/models":
            status = 404 if self.models is None else 200
            _write_json(writer, status, json.dumps({"object": "list", "data": self.models}))
            return True
        reply = self.reply(path, body)
        if reply.status != 200:
            _write_json(writer, reply.status, reply.body)
            return True
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            return await self._stream(writer, path, body, reply)
        finally:
            self.num_open -= 1

    async def _stream(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any], reply: Reply) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        is_chat = path.endswith("/chat/completions")
        if is_chat:
            _event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        await until(lambda: not reply.hangs and reply.may_begin())
        await self.sleep(reply.ttft)
        for number in range(reply.num_tokens):
            if number in (reply.cut_after, reply.error_after):
                if number == reply.error_after:
                    _event(writer, {"error": {"message": "the device is gone"}})
                    await writer.drain()
                return False
            text = f" {number}" if reply.has_text else ""
            content: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
            finish = "length" if number == reply.num_tokens - 1 else None
            _event(writer, {"choices": [{"index": 0, "finish_reason": finish, **content}]})
            await writer.drain()
            if finish is None:
                await self.sleep(reply.gap)
        if reply.has_usage:
            prompt = body.get("prompt", body.get("messages"))
            usage = {"prompt_tokens": len(prompt), "completion_tokens": reply.num_tokens}
            _event(writer, {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 1}}})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def _write_json(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    length = len(text.encode())
    head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    writer.write((head + text).encode())


def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


@contextlib.contextmanager
def scripted(reply: Callable[[str, dict[str, Any]], Reply] | None = None, **model: Any) -> Iterator[ScriptedServer]:
    """A server from start to end, with one model of these fields."""
    server = ScriptedServer(reply or (lambda path, body: Reply()), [{"id": "scripted", **model}])
    server.start()
    try:
        yield server
    finally:
        server.stop()
