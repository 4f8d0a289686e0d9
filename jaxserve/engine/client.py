"""EngineClient: the server's and LLM's interface to an engine, wherever it runs. No jax here.

`local.LocalEngineClient` runs the engine in a thread of this process, `remote.RemoteEngineClient` connects to one in
another process. Clients have text, the engine only token ids.
"""

import abc
from collections.abc import Callable

import msgspec

from jaxserve.loading.reranker import Reranker
from jaxserve.request import EngineOutput, EngineRequest
from jaxserve.sampling_params import DEFAULT_MAX_LOGPROBS
from jaxserve.scheduling.snapshot import RequestSnapshot

OutputSink = Callable[[list[EngineOutput]], None]


def window_name(window: int | None) -> str:
    """Return the name of layers with this window."""
    return "full" if window is None else f"window of {window}"


class KVKind(msgspec.Struct, frozen=True, kw_only=True):
    """The layers with the same window, None for those without one.

    `bytes_per_token` is what the blocks of all of these layers take for a token that is within the window, and
    `read_per_token` what attention reads of them: pools that a block has for other layers stay unread.
    """

    window: int | None
    num_layers: int
    bytes_per_token: int
    read_per_token: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of an engine, with which the front end validates requests."""

    model: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    """Most likely tokens that a request may ask for, -1 for all."""
    embedding_dimensions: tuple[int, ...] | None = None
    """Lengths to which an embedding may be cut, as the model was trained for them; () means any, None no other
    length.
    """
    weight_bytes: int
    """Bytes of the weights that every step reads: all but experts, and the embedding unless it is also the LM head."""
    expert_bytes: int = 0
    """Bytes of all experts."""
    expert_fraction: float = 0.0
    """Fraction of the experts that a token is routed to."""
    kv_kinds: tuple[KVKind, ...]
    state_bytes: int = 0
    """Bytes of the states that layers keep of a request, on all devices."""
    kv_dtype: str = "float32"
    enable_prefix_caching: bool = True
    reranker: Reranker | None = None
    """How the next token scores a pair of texts, if the model was made for that."""
    can_generate: bool = True
    """False for models with a classification head in place of an LM head."""
    device: str = "cpu"
    """The kind of the devices and, of several, how many."""
    total_weight_bytes: int = 0
    """Bytes of all weights, on all devices."""
    kv_cache_bytes: int = 0
    num_full_requests: int = 0
    """Requests of `max_model_len` tokens that the KV cache holds at once."""
    gpu_memory_utilization: float = 0.0

    def expected_weight_bytes(self, num_tokens: int) -> float:
        """Return the bytes of weights that a step of `num_tokens` tokens reads, if each chooses its experts at
        random.
        """
        return self.weight_bytes + self.expert_bytes * (1 - (1 - self.expert_fraction) ** num_tokens)

    def cache_labels(self) -> dict[str, str]:
        """Return the labels of the metric about the KV cache, with the names that autoscalers read, whatever the device
        is.
        """
        return {
            "block_size": str(self.block_size),
            "num_gpu_blocks": str(self.num_blocks),
            "cache_dtype": self.kv_dtype,
            "enable_prefix_caching": str(self.enable_prefix_caching),
            "prefix_caching_hash_algo": "sha256",
            "num_cpu_blocks": "0",
            "num_gpu_blocks_override": "None",
            "cpu_offload_gb": "0",
            "swap_space": "0",
            "calculate_kv_scales": "False",
            "sliding_window": str(min((kind.window for kind in self.kv_kinds if kind.window), default=None)),
            "is_attention_free": str(not self.kv_kinds),
            "kv_cache_memory_bytes": str(self.kv_cache_bytes),
            "gpu_memory_utilization": str(self.gpu_memory_utilization),
        }

    def kv_bytes(self, num_tokens: float) -> float:
        """Return the bytes of KV that a request of `num_tokens` tokens holds."""
        return sum(kind.bytes_per_token * min(num_tokens, kind.window or num_tokens) for kind in self.kv_kinds)

    def kv_bytes_read(self, num_tokens: float) -> float:
        """Return the bytes of KV that a decode step reads for a request of `num_tokens` tokens."""
        return sum(kind.read_per_token * min(num_tokens, kind.window or num_tokens) for kind in self.kv_kinds)

    def step_bytes(self, num_rows: int, *, context: float) -> float:
        """Return the bytes that a decode step must read: the weights, and the KV of `num_rows` contexts. States are
        read and written.
        """
        kept = self.kv_bytes_read(context) + 2 * self.state_bytes
        return self.expected_weight_bytes(num_rows) + num_rows * kept


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the engine: gauges first, then counters since it started."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_new: int = 0
    """Waiting requests that have not run yet, for lack of room."""
    num_waiting_preempted: int = 0
    """Waiting requests that have run before."""
    num_waiting_deferred: int = 0
    """Waiting requests whose grammar is being compiled."""
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    """KV blocks held by the prefix cache only; they are evicted when no free block is left."""
    kv_cache_usage: float = 0.0
    kv_tokens_held: int = 0
    kv_positions_allocated: int = 0
    kv_bytes_held: dict[str, int] = {}
    """Bytes of KV held by running requests, by `KVKind.name`."""
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_compiles: int = 0
    num_recompiles_after_warmup: int = 0
    num_corrupted_requests: int = 0
    num_steps: int = 0
    step_time_seconds: float = 0.0
    wait_seconds: float = 0.0
    """Those of `step_time_seconds` in which the engine waited for the results of a step."""
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
    spec_decode_num_drafts: int = 0
    """Times that the drafts of a row were verified."""
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    spec_decode_num_accepted_tokens_per_pos: tuple[int, ...] = ()
    """Accepted first, second, ... drafts of a row; empty without speculation."""
    expert_tokens: tuple[int, ...] = ()
    """Tokens that each expert has had, of all layers together; empty if they are not counted."""


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state at one moment: running and waiting requests, and the use of every KV block.

    `waiting` has the first few of `stats.num_waiting`. `blocks` is encoded by `BlocksSnapshot.runs`.
    `num_output_tokens` counts since the start.
    """

    stats: EngineStats
    num_output_tokens: int
    running: list[RequestSnapshot]
    waiting: list[RequestSnapshot]
    blocks: list[int]


class EngineClient(abc.ABC):
    """The interface between text and HTTP on one side and the engine on the other."""

    info: EngineInfo

    @abc.abstractmethod
    def submit(self, requests: list[EngineRequest], sink: OutputSink) -> None:
        """Queue sequences. Thread-safe.

        `sink` is called on the engine's thread with all outputs of a step for the requests that have this sink. It must
        be fast; one that raises loses its requests. Each request's last output has a `finish_reason`. When the engine
        dies, `is_alive` turns false first; then every unfinished request gets a last output with finish_reason "error"
        and the cause.

        Raises EngineDead, QueueFull or InvalidRequest; none of `requests` has been queued then. A client of an engine
        in another process may learn of a refusal only later: each request's only output is then an "error" with the
        `refusal`.
        """

    @abc.abstractmethod
    def abort(self, request_ids: list[str]) -> None:
        """Drop these requests at the next step and free their blocks. Thread-safe. There may be no further output.

        Unknown or finished ids are ignored.
        """

    @abc.abstractmethod
    def stats(self) -> EngineStats:
        """Return the latest stats; never waits for a step."""

    def stats_by_engine(self) -> dict[str, EngineStats]:
        """Return the latest stats of each engine behind this client, by its number; of one that has died, zeros."""
        return {"0": self.stats() if self.is_alive() else EngineStats()}

    @property
    def info_of_one(self) -> EngineInfo:
        """The sizes of one engine; all are alike."""
        return self.info

    @abc.abstractmethod
    def snapshot(self) -> EngineSnapshot:
        """Copy the engine's state between two steps, waiting for the current one. Raises EngineDead."""

    @abc.abstractmethod
    def is_alive(self) -> bool:
        """Return true while the engine is running."""

    @abc.abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Drop every cached block that no request holds. Returns false, and does nothing, while a request is
        running.
        """

    @abc.abstractmethod
    def start_profile(self, directory: str) -> None:
        """Record what device and host do, but for Python's calls, into a directory of the engine's machine, until
        `stop_profile`.

        Raises InvalidRequest if it is being recorded already.
        """

    @abc.abstractmethod
    def stop_profile(self) -> None:
        """Stop the profile and write it. Raises InvalidRequest if there is none."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop the engine and free the device; running requests end with finish_reason "abort". Idempotent."""
