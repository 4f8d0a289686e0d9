"""EngineClient: what the server and LLM hold of an engine, wherever it runs. No jax here.

`local.LocalEngineClient` runs the engine in a thread of this process, `remote.RemoteEngineClient` speaks to one in a
process of its own. Text lives on this side of the line, token ids on the other.
"""

import abc
from collections.abc import Callable

import msgspec

from jaxserve.request import EngineOutput, EngineRequest
from jaxserve.scheduling.snapshot import RequestSnapshot

OutputSink = Callable[[list[EngineOutput]], None]


def window_name(window: int | None) -> str:
    """What layers are called that look so far back."""
    return "full" if window is None else f"window of {window}"


class KVKind(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that look equally far back, None: to the beginning. `bytes_per_token` is what a token takes that they
    still see, in all of them.
    """

    window: int | None
    num_layers: int
    bytes_per_token: int

    @property
    def name(self) -> str:
        """In words."""
        return window_name(self.window)


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front end must know of the engine to validate requests."""

    model: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    embedding_dimensions: tuple[int, ...] | None = None
    """Lengths to which a vector may be cut, () any: for what the model was trained; None: for none."""
    weight_bytes: int
    """Of the weights that every step reads: all but experts, and the embedding unless it is the LM head too."""
    expert_bytes: int = 0
    """Of all experts."""
    expert_share: float = 0.0
    """Of the experts, those that a token goes to."""
    kv_kinds: tuple[KVKind, ...]
    kv_dtype: str = "float32"
    enable_prefix_caching: bool = True

    def expected_weight_bytes(self, num_tokens: int) -> float:
        """Bytes of weights that a step of so many tokens reads, if each chooses its experts as if by lot."""
        return self.weight_bytes + self.expert_bytes * (1 - (1 - self.expert_share) ** num_tokens)

    def cache_labels(self) -> dict[str, str]:
        """Return what a metric says of the KV cache, under the names that autoscalers read, whatever the device is."""
        return {
            "block_size": str(self.block_size),
            "num_gpu_blocks": str(self.num_blocks),
            "cache_dtype": self.kv_dtype,
            "enable_prefix_caching": str(self.enable_prefix_caching),
        }

    def kv_bytes(self, num_tokens: float) -> float:
        """Bytes of KV that a request of so many tokens holds, and that a step reads for it."""
        return sum(kind.bytes_per_token * min(num_tokens, kind.window or num_tokens) for kind in self.kv_kinds)


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the engine: gauges first, then counters since it started."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_new: int = 0
    """Waiting requests that have not run yet, and could if there were room."""
    num_waiting_preempted: int = 0
    """Waiting requests that have run before."""
    num_waiting_deferred: int = 0
    """Waiting requests whose grammar is being compiled."""
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    """KV blocks that only the prefix cache holds; they are given to requests when no free one is left."""
    kv_cache_usage: float = 0.0
    kv_tokens_held: int = 0
    kv_positions_allocated: int = 0
    kv_bytes_held: dict[str, int] = {}
    """Of running requests, by `KVKind.name`."""
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_compiles: int = 0
    num_recompiles_after_warmup: int = 0
    num_corrupted_requests: int = 0
    num_steps: int = 0
    step_time_seconds: float = 0.0
    num_step_tokens: int = 0
    step_time_counts: tuple[int, ...] = ()
    """Steps in each bucket of `metrics.STEP_TIMES`, and those beyond the last."""
    step_tokens_counts: tuple[int, ...] = ()
    """Steps in each bucket of `metrics.STEP_TOKENS`, and those beyond the last."""
    preemption_counts: tuple[int, ...] = ()
    """Requests that have ended in each bucket of `metrics.PREEMPTIONS`, and those beyond the last."""
    num_ended_preemptions: int = 0
    """Preemptions of these requests."""
    hbm_bandwidth_utilization: float = 0.0


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's inside at one moment: who runs, who waits, and what every KV block is used for.

    `waiting` has the first few of `stats.num_waiting`. `blocks` is as `BlocksSnapshot.runs` has it. `num_output_tokens`
    counts since the start.
    """

    stats: EngineStats
    num_output_tokens: int
    running: list[RequestSnapshot]
    waiting: list[RequestSnapshot]
    blocks: list[int]


class EngineClient(abc.ABC):
    """The border between those who speak text and HTTP, and the engine."""

    info: EngineInfo

    @abc.abstractmethod
    def submit(self, requests: list[EngineRequest], sink: OutputSink) -> None:
        """Queue sequences; from any thread. `sink` is then called on the engine's thread, with all outputs that one
        step has for the requests that share this sink; it must be quick, and one that raises loses its requests. Each
        request's last output has a `finish_reason`. When the engine dies, `is_alive` turns false first; then every
        unfinished request gets a last output with finish_reason "error" and the cause.

        Raises EngineDead, QueueFull or InvalidRequest; then none of `requests` was queued. A client of an engine in
        another process cannot always know so soon: then each request's only output is an "error" with the `refusal`.
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
    def snapshot(self) -> EngineSnapshot:
        """What the engine holds, copied between two steps: waits for the one that runs. Raises EngineDead."""

    @abc.abstractmethod
    def is_alive(self) -> bool:
        """Whether the engine still steps."""

    @abc.abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget every cached block that no request holds. Returns whether it could be done (no request is running)."""

    @abc.abstractmethod
    def start_profile(self, directory: str) -> None:
        """Record what device and host do, but for Python's calls, into a directory of the engine's machine, until
        `stop_profile`.

        Raises InvalidRequest if it is being recorded already.
        """

    @abc.abstractmethod
    def stop_profile(self) -> None:
        """Write the recording. Raises InvalidRequest if there is none."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop the engine and free the device; running requests end with finish_reason "abort". Idempotent."""
