"""The client of several equal engines, each in a process of its own (`remote`): to its users they are one. No jax here.

Requests go where most of their prompt is cached (`router`). What one engine was doing when it died has failed; the
others go on, and get its share until it is back.
"""

import asyncio
import itertools
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, override

import msgspec

from jaxserve.engine.client import EngineClient, EngineInfo, EngineSnapshot, EngineStats, OutputSink
from jaxserve.engine.remote import RemoteEngineClient
from jaxserve.engine.router import PrefixRouter, prompt_chunks
from jaxserve.errors import EngineDead, StartupError
from jaxserve.request import EngineRequest
from jaxserve.scheduling.snapshot import RequestSnapshot

_MEANS = ("kv_cache_usage", "hbm_bandwidth_utilization")
"""Statistics of an engine of which several have a mean; all others have a sum."""


class ReplicatedEngineClient(EngineClient):
    """One client of several engine processes. Thread-safety and errors are those of `RemoteEngineClient`."""

    def __init__(self, engines: Mapping[int, RemoteEngineClient], *, num_engines: int, name: str):
        """Use `connect`."""
        one = next(iter(engines.values())).info
        self.info = of_all(one, num_engines)
        self._info_of_one = one
        self._name = name
        self._engines: list[RemoteEngineClient | None] = [engines.get(index) for index in range(num_engines)]
        self._router = PrefixRouter(num_tokens=one.num_blocks * one.block_size)
        self._lock = threading.Lock()
        self._connecting: dict[int, asyncio.Task[None]] = {}
        for index, engine in engines.items():
            engine.on_placed = self._placed(index)

    @classmethod
    async def connect(cls, folders: Mapping[int, pathlib.Path], name: str, *, num_engines: int) -> Self:
        """Wait until all engines that read in `folders`, by their numbers, run. Cancel to give up.

        Raises StartupError if they are not alike.
        """
        found = await asyncio.gather(*(RemoteEngineClient.connect(folder, name) for folder in folders.values()))
        engines = dict(zip(folders, found, strict=True))
        for (index, engine), (other, beside) in itertools.pairwise(engines.items()):
            if engine.info.device != beside.info.device:
                raise StartupError(
                    f"data_parallel_size needs as many devices of one kind: engine {index} runs on "
                    f"{engine.info.device}, engine {other} on {beside.info.device}"
                )
        return cls(engines, num_engines=num_engines, name=name)

    def replace(self, index: int, folder: pathlib.Path) -> None:
        """Begin to connect to an engine that was started again. Call it in the event loop."""
        self._connecting[index] = asyncio.create_task(self._connect(index, folder))

    async def _connect(self, index: int, folder: pathlib.Path) -> None:
        engine = await RemoteEngineClient.connect(folder, self._name)
        engine.on_placed = self._placed(index)
        with self._lock:
            self._router.forget(index)
        self._engines[index] = engine

    def engine_died(self, index: int, reason: str) -> None:
        """Notify everyone who waits for one of the engines that it has ended. Call it in the event loop."""
        if index in self._connecting:  # it may have died before it answered
            self._connecting.pop(index).cancel()
        engine, self._engines[index] = self._engines[index], None
        if engine is not None:
            engine.engine_died(reason)
            engine.close()

    @override
    def submit(self, requests: list[EngineRequest], sink: OutputSink) -> None:
        of_engine: dict[int, list[EngineRequest]] = {}
        chunks_of: dict[int, list[list[bytes]]] = {}
        for _, siblings in itertools.groupby(requests, key=lambda request: request.group_id):
            group = list(siblings)
            chunks = prompt_chunks(group[0].prompt_token_ids, group[0].cache_salt)
            with self._lock:
                index = self._router.choose(chunks, self._loads({i: len(chosen) for i, chosen in of_engine.items()}))
                self._router.record(index, chunks)
            of_engine.setdefault(index, []).extend(group)
            chunks_of.setdefault(index, []).append(chunks)
        for index, chosen in of_engine.items():
            engine = self._engines[index]
            if engine is None:  # it has died since
                raise EngineDead("the engine has stopped")
            engine.submit(chosen, sink, chunks=chunks_of[index])

    @override
    def abort(self, request_ids: list[str]) -> None:
        for engine in self._alive():
            engine.abort(request_ids)

    @override
    def stats(self) -> EngineStats:
        return total_stats([engine.stats() for engine in self._alive()])

    @override
    def stats_by_engine(self) -> dict[str, EngineStats]:
        return {
            str(index): engine.stats() if engine is not None and engine.is_alive() else EngineStats()
            for index, engine in enumerate(self._engines)
        }

    @property
    @override
    def info_of_one(self) -> EngineInfo:
        return self._info_of_one

    @override
    def snapshot(self) -> EngineSnapshot:
        return total_snapshot(
            [
                (index * self.info.num_blocks // len(self._engines), engine.snapshot())
                for index, engine in enumerate(self._engines)
                if engine is not None and engine.is_alive()
            ]
        )

    @override
    def is_alive(self) -> bool:
        return any(True for _ in self._alive())

    @override
    def reset_prefix_cache(self) -> bool:
        dropped = [engine.reset_prefix_cache() for engine in self._alive()]
        return all(dropped)

    @override
    def start_profile(self, directory: str) -> None:
        for index, engine in enumerate(self._engines):
            if engine is not None:
                engine.start_profile(f"{directory}/engine-{index}")

    @override
    def stop_profile(self) -> None:
        for engine in self._alive():
            engine.stop_profile()

    @override
    def close(self) -> None:
        """Disconnect from the engines, which go on. Call it in the event loop."""
        for connecting in self._connecting.values():
            connecting.cancel()
        for engine in self._engines:
            if engine is not None:
                engine.close()

    def _alive(self) -> Iterator[RemoteEngineClient]:
        return (engine for engine in self._engines if engine is not None and engine.is_alive())

    def _loads(self, chosen: Mapping[int, int]) -> list[int | None]:
        """Return how many requests each engine has: ours, those of other clients, and `chosen`. Raises EngineDead.

        An engine's own statistics are too old for this: they do not change during a step.
        """
        loads: list[int | None] = []
        for index, engine in enumerate(self._engines):
            if engine is None or not engine.is_alive():
                loads.append(None)
                continue
            loads.append(engine.num_unfinished + engine.num_others + chosen.get(index, 0))
        if all(load is None for load in loads):
            raise EngineDead("all engines have stopped")
        return loads

    def _placed(self, index: int) -> Callable[[list[list[bytes]]], None]:
        """Return what is called when another client has sent prompts to an engine."""

        def on_placed(prompts: list[list[bytes]]) -> None:
            with self._lock:
                for chunks in prompts:
                    self._router.record(index, chunks)

        return on_placed


def of_all(info: EngineInfo, num_engines: int) -> EngineInfo:
    """Return the sizes of all engines together, of which one has `info`; what a request may have stays the same."""
    names = ("num_blocks", "max_num_seqs", "total_weight_bytes", "kv_cache_bytes", "num_full_requests")
    sums: dict[str, Any] = {name: num_engines * getattr(info, name) for name in names}
    return msgspec.structs.replace(info, **sums, device=f"{num_engines} x {info.device}")


def total_stats(each: list[EngineStats]) -> EngineStats:
    """Return the statistics of several engines as if they were one."""
    if not each:
        return EngineStats()
    total: dict[str, Any] = {}
    for name in EngineStats.__struct_fields__:
        values = [getattr(stats, name) for stats in each]
        if isinstance(values[0], dict):
            total[name] = {key: sum(value.get(key, 0) for value in values) for key in values[0]}
        elif isinstance(values[0], tuple):
            total[name] = tuple(map(sum, itertools.zip_longest(*values, fillvalue=0)))
        else:
            total[name] = sum(values) / len(values) if name in _MEANS else sum(values)
    return EngineStats(**total)


def total_snapshot(each: list[tuple[int, EngineSnapshot]]) -> EngineSnapshot:
    """Return the state of several engines as if they were one, of which each has its blocks from a first one on."""

    def moved(requests: list[RequestSnapshot], first: int) -> list[RequestSnapshot]:
        return [
            msgspec.structs.replace(request, block_ids=[first + block_id for block_id in request.block_ids])
            for request in requests
        ]

    return EngineSnapshot(
        stats=total_stats([snapshot.stats for _, snapshot in each]),
        num_output_tokens=sum(snapshot.num_output_tokens for _, snapshot in each),
        running=[request for first, snapshot in each for request in moved(snapshot.running, first)],
        waiting=[request for first, snapshot in each for request in moved(snapshot.waiting, first)],
        blocks=[number for _, snapshot in each for number in snapshot.blocks],
    )
