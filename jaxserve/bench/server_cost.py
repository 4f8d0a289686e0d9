"""`jaxserve bench server`: what the API side costs, measured over an engine stub that emits tokens at a fixed rate.

Reports the CPU time of the API workers per streamed token, and the latency of short requests, /health and /metrics with
and without the load. The server is the real one, in processes of its own; this process is its client.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, override

import uvloop

from jaxserve.bench import stub_engine
from jaxserve.bench.report import table
from jaxserve.config import DEFAULT_MODEL, ServerConfig
from jaxserve.engine.subprocesses import Child
from jaxserve.errors import RequestFailed
from jaxserve.loading.builtin import resolve_model
from jaxserve.server.process.supervisor import Supervisor
from jaxserve.tokenizer import Tokenizer

NUM_TOKEN_IDS = 97
STREAM_TOKENS = 2**19  # more than any run consumes
SETTLE_SECONDS = 1.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """The load: `num_streams` clients that each receive a token every `step_seconds`, for `seconds`."""

    num_streams: int
    step_seconds: float
    seconds: float
    num_probes: int
    is_chat: bool
    api_workers: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probes:
    """Seconds to the first token of short requests, and to the responses of /health and /metrics."""

    first_token: list[float]
    health: list[float]
    metrics: list[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The CPU seconds of all API workers while `num_tokens` were streamed, and the probes' latencies without and with
    load.
    """

    num_tokens: int
    cpu_seconds: float
    wall_seconds: float
    idle: Probes
    loaded: Probes

    @property
    def microseconds_per_token(self) -> float:
        """CPU time of the API workers per streamed token."""
        return self.cpu_seconds / self.num_tokens * 1e6


class _Stream(asyncio.Protocol):
    """A client that only counts events, so that it costs little CPU time itself."""

    def __init__(self, request: bytes):
        self.num_events = 0
        self.first_event = asyncio.get_running_loop().create_future()
        self.ended = asyncio.get_running_loop().create_future()
        self._request = request

    @override
    def connection_made(self, transport: Any) -> None:  # uvloop's transports do not subclass asyncio.Transport
        self._sent = time.perf_counter()
        transport.write(self._request)

    @override
    def data_received(self, data: bytes) -> None:
        self.num_events += data.count(b"data: ")
        if self.num_events and not self.first_event.done():
            self.first_event.set_result(time.perf_counter() - self._sent)
        if b"[DONE]" in data and not self.ended.done():
            self.ended.set_result(None)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class _Get(asyncio.Protocol):
    """A client that requests one path. `answered` resolves to the seconds until the first bytes of the response."""

    def __init__(self, path: bytes):
        self.answered = asyncio.get_running_loop().create_future()
        self._request = b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path

    @override
    def connection_made(self, transport: Any) -> None:
        self._sent = time.perf_counter()
        transport.write(self._request)

    @override
    def data_received(self, data: bytes) -> None:
        if self.answered.done():
            return
        if data.startswith(b"HTTP/1.1 200 "):
            self.answered.set_result(time.perf_counter() - self._sent)
        else:
            self.answered.set_exception(RequestFailed(f"the server answered {data[:80]!r}"))

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if not self.answered.done():
            self.answered.set_exception(RequestFailed("the server has closed a connection without an answer"))


def run(load: Load) -> Result:
    """Run the benchmark. Raises StartupError, and RequestFailed if a stream ends early."""
    return uvloop.run(_run(load))


async def _run(load: Load) -> Result:
    async with _server(load) as (supervisor, pids):
        idle = await _probe(supervisor, load)
        streams = [await _open(supervisor, load, max_tokens=STREAM_TOKENS) for _ in range(load.num_streams)]
        await asyncio.gather(*(stream.first_event for stream in streams))
        await asyncio.sleep(SETTLE_SECONDS)
        start, cpu, count = time.perf_counter(), _cpu_seconds(pids), sum(stream.num_events for stream in streams)
        await asyncio.sleep(load.seconds)
        num_tokens = sum(stream.num_events for stream in streams) - count
        result = {"cpu_seconds": _cpu_seconds(pids) - cpu, "wall_seconds": time.perf_counter() - start}
        loaded = await _probe(supervisor, load)
        broken = sum(stream.ended.done() for stream in streams)
    if broken:
        raise RequestFailed(f"{broken} of {load.num_streams} streams have ended early")
    return Result(num_tokens=num_tokens, idle=idle, loaded=loaded, **result)


@contextlib.asynccontextmanager
async def _server(load: Load) -> AsyncIterator[tuple[Supervisor, list[int]]]:
    path = resolve_model(DEFAULT_MODEL)
    tokenizer = Tokenizer.load(path)
    # Only tokens that are whole ASCII words: each makes an event, as no part of a character is held back.
    ids = [i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i).strip().isascii()][-NUM_TOKEN_IDS:]

    async def start_engine(_index: int, folder: pathlib.Path) -> Child:
        settings = stub_engine.Settings(
            folder=str(folder), vocab_size=tokenizer.vocab_size, token_ids=ids, step_seconds=load.step_seconds
        )
        return await Child.start("the engine", "jaxserve.bench.stub_engine", settings)

    config = ServerConfig(
        port=0, served_model_name="stub", api_workers=load.api_workers, shutdown_timeout=0, log_level="error"
    )
    supervisor = Supervisor(config, start_engine=start_engine, model_path=path, tokenizer=path, seed=0)
    running = asyncio.create_task(supervisor.run())
    serving = asyncio.create_task(supervisor.serving.wait())
    await asyncio.wait([running, serving], return_when=asyncio.FIRST_COMPLETED)
    try:
        if running.done():
            running.result()
        yield supervisor, supervisor.worker_pids
    finally:
        supervisor.stop()
        await running


async def _open(supervisor: Supervisor, load: Load, *, max_tokens: int) -> _Stream:
    """Start one streaming request."""
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if load.is_chat else {"prompt": "hi"}
    body = json.dumps({**prompt, "stream": True, "max_tokens": max_tokens}).encode()
    path = b"/v1/chat/completions" if load.is_chat else b"/v1/completions"
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return await _connect(supervisor, lambda: _Stream(head % (path, len(body)) + body))


async def _connect[P: asyncio.Protocol](supervisor: Supervisor, protocol: Callable[[], P]) -> P:
    host, port = supervisor.address
    return (await asyncio.get_running_loop().create_connection(protocol, host, port))[1]


async def _probe(supervisor: Supervisor, load: Load) -> Probes:
    """Send short requests of each kind, one after another."""
    probes = Probes(first_token=[], health=[], metrics=[])
    for _ in range(load.num_probes):
        stream = await _open(supervisor, load, max_tokens=1)
        probes.first_token.append(await stream.first_event)
        await stream.ended
        probes.health.append(await (await _connect(supervisor, lambda: _Get(b"/health"))).answered)
        probes.metrics.append(await (await _connect(supervisor, lambda: _Get(b"/metrics"))).answered)
    return probes


def _cpu_seconds(pids: list[int]) -> float:
    """Return the user and system time of these processes, all threads included."""
    ticks = 0
    for pid in pids:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_SECOND


def report(load: Load, result: Result) -> str:
    """Format the cost per token and the probes' latencies as two tables."""
    rate = result.num_tokens / result.wall_seconds
    cost = [
        ["streams", str(load.num_streams)],
        ["API workers", str(load.api_workers)],
        ["streamed tokens/s", f"{rate:.0f} (of {load.num_streams / load.step_seconds:.0f} emitted)"],
        ["CPU of the API side, us/token", f"{result.microseconds_per_token:.1f}"],
    ]
    rows = []
    for what, field in (("first token", "first_token"), ("/health", "health"), ("/metrics", "metrics")):
        for name, probes in (("idle", result.idle), (f"{load.num_streams} streams", result.loaded)):
            times: list[float] = getattr(probes, field)
            percentiles = statistics.quantiles(times, n=100, method="inclusive")
            cells = (*(percentiles[p - 1] for p in (50, 90, 99)), max(times))
            rows.append([f"{what}, {name}", *(f"{seconds * 1e3:.2f}" for seconds in cells)])
    header = ["a short request's", "p50 ms", "p90 ms", "p99 ms", "max ms"]
    return table(["server over an engine stub", "value"], cost) + "\n\n" + table(header, rows)
