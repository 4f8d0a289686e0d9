"""An EngineClient that plays scripts: for tests of whatever uses an engine. `from fake_client import ...`.

It keeps the engine's promises: tokens come from a thread of its own, one call per step and sink, requests end at their
stop token ids and at max_tokens, logprobs come if requested.
"""

import contextlib
import dataclasses
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from waiting import wait_until

from jaxserve.engine.client import EngineClient, EngineInfo, EngineSnapshot, EngineStats, KVKind, OutputSink
from jaxserve.errors import EngineDead, InvalidRequest, JaxserveError
from jaxserve.request import EngineOutput, EngineRequest, Refusal, TokenLogprobs
from jaxserve.sampling_params import DEFAULT_MAX_LOGPROBS
from jaxserve.scheduling.snapshot import RequestSnapshot

HIDDEN_SIZE = 4


@dataclasses.dataclass(kw_only=True)
class Script:
    """What the fake engine does with one request.

    After `token_ids` it ends with "stop" (as after EOS), or with an error (an exception: a refusal), or hangs until it
    is aborted. Stop token ids and max_tokens end it earlier, as in the engine.
    """

    token_ids: Iterable[int]
    tokens_per_step: int = 1
    error: str | JaxserveError | None = None
    hangs: bool = False
    num_cached_tokens: int = 0


def echo(request: EngineRequest) -> Script:
    """Repeat the prompt without its first token (BOS) until max_tokens."""
    prompt = request.prompt_token_ids[1:] or request.prompt_token_ids
    return Script(token_ids=[prompt[i % len(prompt)] for i in range(request.max_tokens)])


def embedding(request: EngineRequest) -> bytes:
    """Return the vector of a pooling request: the powers of its last token, or of the mean of all."""
    token_ids = request.prompt_token_ids
    base = token_ids[-1] if request.pooling == "last" else sum(token_ids) / len(token_ids)
    return struct.pack(f"<{HIDDEN_SIZE}f", *(base**i for i in range(HIDDEN_SIZE)))


@dataclasses.dataclass
class _Running:
    request: EngineRequest
    sink: OutputSink
    script: Script
    token_ids: list[int]
    num_emitted: int = 0
    prompt_done: bool = False


class FakeEngineClient(EngineClient):
    """`play` is called once a sequence and returns its Script. `step_seconds` is the least time between steps.

    Set `refusal` to make `submit` raise it, and `pause` to be called after each step. `submitted`, `aborted`,
    `profiles` and `num_sink_calls` record what happened.
    """

    def __init__(
        self,
        play: Callable[[EngineRequest], Script] = echo,
        *,
        vocab_size: int = 512,
        max_model_len: int = 512,
        eos_token_ids: tuple[int, ...] = (2,),
        embedding_dimensions: tuple[int, ...] | None = (),
        step_seconds: float = 0.0,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
    ):
        self.info = EngineInfo(
            model="fake",
            vocab_size=vocab_size,
            hidden_size=HIDDEN_SIZE,
            embedding_dimensions=embedding_dimensions,
            max_logprobs=max_logprobs,
            max_model_len=max_model_len,
            block_size=16,
            num_blocks=1024,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            eos_token_ids=eos_token_ids,
            weight_bytes=0,
            kv_kinds=(KVKind(window=None, num_layers=2, bytes_per_token=64, read_per_token=64),),
        )
        self.refusal: Exception | None = None
        self.submitted: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.profiles: list[str] = []
        self.num_sink_calls = 0
        self.num_steps = 0
        self._num_steps_told = 0
        self.num_snapshots = 0
        self.num_output_tokens = 0
        self._play = play
        self.pause: Callable[[], object] = lambda: time.sleep(step_seconds)
        self._running: dict[str, _Running] = {}
        self._changed = threading.Condition()
        self._is_alive = True
        self._death = "it is closed"
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: list[EngineRequest], sink: OutputSink) -> None:
        with self._changed:
            if not self._is_alive:
                raise EngineDead("the engine is dead")
            if self.refusal is not None:
                raise self.refusal
            for request in requests:
                assert request.request_id not in self._running, "request ids must be unique"
                script = self._play(request)
                self._running[request.request_id] = _Running(request, sink, script, list(script.token_ids))
            self.submitted += requests
            self._changed.notify_all()

    def abort(self, request_ids: list[str]) -> None:
        with self._changed:
            self.aborted += request_ids
            for request_id in request_ids:
                self._running.pop(request_id, None)
            self._changed.notify_all()

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._running), num_steps=self.num_steps)

    def snapshot(self) -> EngineSnapshot:
        if not self._is_alive:
            raise EngineDead(f"the engine has stopped: {self._death}")
        self.num_snapshots += 1
        running = [
            RequestSnapshot(
                request_id=entry.request.request_id,
                slot=slot,
                priority=0,
                num_prompt_tokens=len(entry.request.prompt_token_ids),
                num_cached_tokens=entry.script.num_cached_tokens,
                num_computed_tokens=len(entry.request.prompt_token_ids) + entry.num_emitted,
                num_output_tokens=entry.num_emitted,
                max_tokens=entry.request.max_tokens,
                num_preemptions=0,
                block_ids=[slot],
            )
            for slot, entry in enumerate(list(self._running.values()))
        ]
        num_held, num_blocks = len(running), self.info.num_blocks
        return EngineSnapshot(
            stats=self.stats(),
            num_output_tokens=self.num_output_tokens,
            running=running,
            waiting=[],
            blocks=[1, num_held, 0, num_blocks - num_held],
        )

    def is_alive(self) -> bool:
        return self._is_alive

    def reset_prefix_cache(self) -> bool:
        return not self._running

    def start_profile(self, directory: str) -> None:
        if self.profiles and not self.profiles[-1].endswith("(done)"):
            raise InvalidRequest("a profile is being recorded already")
        self.profiles.append(directory)

    def stop_profile(self) -> None:
        if not self.profiles or self.profiles[-1].endswith("(done)"):
            raise InvalidRequest("no profile is being recorded")
        self.profiles[-1] += " (done)"

    def close(self) -> None:
        self._end(lambda request: EngineOutput(request_id=request.request_id, finish_reason="abort"))
        self._thread.join(timeout=10)

    def die(self, message: str = "the device is gone", *, silently: bool = False) -> None:
        """End like an engine whose loop has raised: every request gets an error; if `silently`, nobody is told."""
        self._death = message
        if silently:
            with self._changed:
                self._running.clear()
        self._end(lambda request: EngineOutput(request_id=request.request_id, finish_reason="error", error=message))

    def held(self) -> contextlib.AbstractContextManager[Any]:
        """Hold the engine's steps; what this thread submits meanwhile arrives together."""
        return self._changed

    def wait_until_told(self) -> None:
        """Wait until there is nothing more to do, and the sinks have it all. Raises TimeoutError."""

        def is_told() -> bool:
            with self._changed:
                return not self._has_work() and self._num_steps_told == self.num_steps

        wait_until(is_told)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _end(self, last_output: Callable[[EngineRequest], EngineOutput]) -> None:
        with self._changed:
            self._is_alive = False
            running = list(self._running.values())
            self._running.clear()
            self._changed.notify_all()
        self._send([(entry, last_output(entry.request)) for entry in running])

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_work() or not self._is_alive)
                if not self._is_alive:
                    return
                news = [(entry, self._advance(entry)) for entry in self._running.values() if self._is_busy(entry)]
                for entry, output in news:
                    if output.finish_reason is not None:
                        del self._running[entry.request.request_id]
                self.num_steps += 1
                self.num_output_tokens += sum(len(output.new_token_ids) for _, output in news)
            self._send(news)
            self._num_steps_told += 1
            self.pause()

    def _send(self, news: list[tuple[_Running, EngineOutput]]) -> None:
        by_sink: dict[OutputSink, list[EngineOutput]] = {}
        for entry, output in news:
            by_sink.setdefault(entry.sink, []).append(output)
        for sink, outputs in by_sink.items():
            self.num_sink_calls += 1
            sink(outputs)

    def _has_work(self) -> bool:
        return any(self._is_busy(entry) for entry in self._running.values())

    def _is_busy(self, entry: _Running) -> bool:
        return not entry.script.hangs or entry.num_emitted < len(entry.token_ids)

    def _advance(self, entry: _Running) -> EngineOutput:
        request, script = entry.request, entry.script
        common = {"request_id": request.request_id, "num_cached_tokens": script.num_cached_tokens}
        if request.pooling is not None and not script.error:
            return EngineOutput(embedding=embedding(request), finish_reason="stop", **common)
        if not entry.prompt_done:
            entry.prompt_done = True
            if request.params.prompt_logprobs is not None:
                rest = request.prompt_token_ids[1:]
                logprobs = [self._logprobs(token_id, request.params.prompt_logprobs) for token_id in rest]
                return EngineOutput(prompt_logprobs=logprobs, **common)
        new, finish_reason, stop_reason, error = [], None, None, None
        while len(new) < script.tokens_per_step and finish_reason is None:
            if entry.num_emitted == len(entry.token_ids):
                finish_reason, error = ("error", script.error) if script.error else ("stop", None)
                break
            new.append(entry.token_ids[entry.num_emitted])
            entry.num_emitted += 1
            if new[-1] in request.stop_token_ids and entry.num_emitted > request.params.min_tokens:
                finish_reason, stop_reason = "stop", new[-1]
            elif entry.num_emitted == request.max_tokens:
                finish_reason = "length"
            elif script.hangs and entry.num_emitted == len(entry.token_ids):
                break
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = [
                self._logprobs(token_id, request.params.logprobs, asked=request.params.logprob_token_ids)
                for token_id in new
            ]
        return EngineOutput(
            new_token_ids=new,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            logprobs=logprobs,
            error=None if error is None else str(error),
            refusal=Refusal.of(error) if isinstance(error, JaxserveError) else None,
            **common,
        )

    def _logprobs(self, token_id: int, num_top: int, *, asked: Sequence[int] | None = None) -> TokenLogprobs:
        """Return log probabilities where the token is always the second most likely one."""
        top = [(token_id + 1 + i) % self.info.vocab_size if i != 1 else token_id for i in range(num_top)]
        named = [(each, -float(each), 1 + each) for each in asked or ()]
        return TokenLogprobs(token_id, -1.5, 2, top, [-0.5 - i for i in range(num_top)], named)


def collect(frontend, *groups):
    """Return the results of prompts that a front end generates together."""
    for _ in frontend.generate(groups):
        pass
    return [group.result() for group in groups]
