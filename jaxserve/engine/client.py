"""EngineClient: what the server and LLM hold of an engine, wherever it runs. No jax here.

`local.LocalEngineClient` runs the engine in a thread of this process; a client of an engine in another process has the
same five calls. Text lives on this side of the line, token ids on the other.
"""

import abc
from collections.abc import Callable

import msgspec

from jaxserve.request import EngineOutput, EngineRequest

OutputSink = Callable[[list[EngineOutput]], None]


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front end must know of the engine to validate requests."""

    model: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the engine: gauges first, then counters since it started."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    kv_tokens_held: int = 0
    kv_positions_allocated: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_compiles: int = 0
    num_recompiles_after_warmup: int = 0
    num_corrupted_requests: int = 0
    num_steps: int = 0
    step_time_seconds: float = 0.0
    num_step_tokens: int = 0


class EngineClient(abc.ABC):
    """The border between those who speak text and HTTP, and the engine."""

    info: EngineInfo

    @abc.abstractmethod
    def submit(self, requests: list[EngineRequest], sink: OutputSink) -> None:
        """Queue sequences; from any thread. `sink` is then called on the engine's thread, with all outputs that one
        step has for the requests that share this sink; it must be quick, and one that raises loses its requests. Each
        request's last output has a `finish_reason`. When the engine dies, `is_alive` turns false first; then every
        unfinished request gets a last output with finish_reason "error" and the cause.

        Raises EngineDead, QueueFull or InvalidRequest; then none of `requests` was queued.
        """

    @abc.abstractmethod
    def abort(self, request_ids: list[str]) -> None:
        """Drop these requests at the next step and free their blocks; from any thread. No further output is promised.
        Unknown or finished ids are ignored.
        """

    @abc.abstractmethod
    def stats(self) -> EngineStats:
        """The latest snapshot; never waits for a step."""

    @abc.abstractmethod
    def is_alive(self) -> bool:
        """Whether the engine still steps."""

    @abc.abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget every cached block that no request holds. Returns whether it could be done (no request is running)."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop the engine and free the device; running requests end with finish_reason "abort". Idempotent."""
