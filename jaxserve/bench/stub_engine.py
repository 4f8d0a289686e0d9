"""An engine stub that generates a token for each request at a fixed rate, for measuring the server alone.

Started as `python -m jaxserve.bench.stub_engine` instead of `jaxserve.engine.process`. The first token of a request
comes at once, as if prefill took no time.
"""

import itertools
import pathlib
import sys
import threading
import time
from typing import override

import msgspec

from jaxserve.engine.client import EngineClient, EngineInfo, EngineSnapshot, EngineStats, OutputSink
from jaxserve.engine.process import serve
from jaxserve.engine.subprocesses import Parent, run_child
from jaxserve.request import EngineOutput, EngineRequest


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the stub. Every request generates `token_ids` in turn, one each `step_seconds`."""

    folder: str
    vocab_size: int
    token_ids: list[int]
    step_seconds: float


class StubEngineClient(EngineClient):
    """An EngineClient whose engine is a thread that only counts."""

    def __init__(self, settings: Settings):
        self.info = EngineInfo(
            model="stub",
            vocab_size=settings.vocab_size,
            hidden_size=1,
            max_model_len=2**20,
            block_size=16,
            num_blocks=2**20,
            max_num_seqs=2**16,
            max_num_batched_tokens=2**20,
            eos_token_ids=(),
            weight_bytes=0,
            kv_kinds=(),
        )
        self._settings = settings
        self._lock = threading.Lock()
        self._running: dict[str, tuple[EngineRequest, OutputSink, int]] = {}  # id -> request, sink, tokens so far
        self._num_steps = 0
        self._is_alive = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @override
    def submit(self, requests: list[EngineRequest], sink: OutputSink) -> None:
        with self._lock:
            self._running.update({request.request_id: (request, sink, 0) for request in requests})
            self._step([request.request_id for request in requests])

    @override
    def abort(self, request_ids: list[str]) -> None:
        with self._lock:
            for request_id in request_ids:
                self._running.pop(request_id, None)

    @override
    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._running), num_steps=self._num_steps)

    @override
    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(stats=self.stats(), num_output_tokens=0, running=[], waiting=[], blocks=[])

    @override
    def is_alive(self) -> bool:
        return self._is_alive

    @override
    def reset_prefix_cache(self) -> bool:
        return not self._running

    @override
    def start_profile(self, directory: str) -> None:
        """Do nothing: there is no device to profile."""

    @override
    def stop_profile(self) -> None:
        """Do nothing: there is no device to profile."""

    @override
    def close(self) -> None:
        self._is_alive = False
        self._thread.join()

    def _run(self) -> None:
        start = time.monotonic()
        for number in itertools.count(1):
            time.sleep(max(0.0, start + number * self._settings.step_seconds - time.monotonic()))
            if not self._is_alive:
                return
            with self._lock:
                self._step(list(self._running))

    def _step(self, request_ids: list[str]) -> None:
        """Emit the next token of each request, in one list per sink."""
        token_ids = self._settings.token_ids
        outputs: dict[OutputSink, list[EngineOutput]] = {}
        for request_id in request_ids:
            request, sink, count = self._running.pop(request_id)
            is_last = count + 1 == request.max_tokens
            if not is_last:
                self._running[request_id] = (request, sink, count + 1)
            output = EngineOutput(
                request_id=request_id,
                new_token_ids=[token_ids[count % len(token_ids)]],
                finish_reason="length" if is_last else None,
            )
            outputs.setdefault(sink, []).append(output)
        self._num_steps += 1
        for sink, batch in outputs.items():
            sink(batch)


def _main(parent: Parent) -> int:
    settings = parent.settings(Settings)
    parent.folder = settings.folder
    return serve(parent, StubEngineClient(settings), pathlib.Path(settings.folder))


if __name__ == "__main__":
    sys.exit(run_child(_main))
