"""What GET /metrics shows: the names and help of every metric, on a registry of their own.

The server observes each sequence while it streams (`SequenceTimer`); what the engine counts is read from its latest
snapshot at scrape time (`EngineCollector`), so that a scrape never waits for a step. Names follow vLLM's dashboards.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

PREFIX = "jaxserve:"

# name -> (field of EngineStats, help)
GAUGES: Mapping[str, tuple[str, str]] = {
    "num_requests_running": ("num_running", "Sequences that run in the engine."),
    "num_requests_waiting": ("num_waiting", "Sequences that wait for the engine."),
    "kv_cache_usage_perc": ("kv_cache_usage", "Share of KV blocks in use; 1 is all."),
    "kv_cache_tokens": ("kv_tokens_held", "Tokens whose KV is held for running sequences."),
    "kv_cache_allocated_positions": ("kv_positions_allocated", "KV positions of the blocks of running sequences."),
}
COUNTERS: Mapping[str, tuple[str, str]] = {
    "prefix_cache_queries_total": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits_total": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "num_preemptions_total": ("num_preemptions", "Sequences that gave their blocks back while running."),
    "compiles_total": ("num_compiles", "Step shapes compiled."),
    "recompiles_after_warmup_total": ("num_recompiles_after_warmup", "Step shapes compiled after warm-up: a bug."),
    "corrupted_requests_total": ("num_corrupted_requests", "Sequences that failed on NaN logits."),
}
# name -> (field with the sum, field with the count, help)
SUMMARIES: Mapping[str, tuple[str, str, str]] = {
    "step_time_seconds": ("step_time_seconds", "num_steps", "Time of engine steps."),
    "iteration_tokens_total": ("num_step_tokens", "num_steps", "Tokens of engine steps, prompt and output."),
}

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.5, 5.0)


class Metrics:
    """Every metric of one server. `model` is the label `model_name` of all of them.

    `stats` returns the engine's latest snapshot, an object with the attributes of EngineStats, without waiting.
    """

    def __init__(self, *, model: str, stats: Callable[[], Any]):
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(model=model, stats=stats))
        self.prompt_tokens = self._counter(model, "prompt_tokens", "Prompt tokens of requests.")
        self.generation_tokens = self._counter(model, "generation_tokens", "Generated tokens.")
        self.time_to_first_token = self._histogram(
            model, "time_to_first_token_seconds", "From arrival to the first token of a sequence."
        )
        self.inter_token_latency = self._histogram(
            model, "inter_token_latency_seconds", "Between two outputs of a sequence.", buckets=_TOKEN_LATENCY
        )
        self.e2e_latency = self._histogram(
            model, "e2e_request_latency_seconds", "From arrival to the end of a sequence."
        )
        self.queue_time = self._histogram(
            model, "request_queue_time_seconds", "From the arrival of a prompt to its first step."
        )
        self.prefill_time = self._histogram(
            model, "request_prefill_time_seconds", "From the first step of a prompt to its first token."
        )
        self.decode_time = self._histogram(
            model, "request_decode_time_seconds", "From the first to the last token of a sequence."
        )
        self._model = model
        self._success = Counter(
            f"{PREFIX}request_success",
            "Sequences that came to an end, by why they did.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )

    def finished(self, reason: str) -> None:
        """Count a sequence that ended with this finish_reason."""
        self._success.labels(self._model, reason).inc()

    def render(self) -> bytes:
        """The text exposition of all metrics."""
        return generate_latest(self._registry)

    def _counter(self, model: str, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ("model_name",), registry=self._registry).labels(model)

    def _histogram(self, model: str, name: str, text: str, *, buckets: tuple[float, ...] = _LATENCY) -> Histogram:
        return Histogram(PREFIX + name, text, ("model_name",), registry=self._registry, buckets=buckets).labels(model)


class SequenceTimer:
    """Observes one sequence, from its `arrival` to its end. Times are seconds of the monotonic clock."""

    __slots__ = ("_arrival", "_first", "_last", "_metrics", "is_finished")

    def __init__(self, metrics: Metrics, *, arrival: float):
        self.is_finished = False
        self._metrics = metrics
        self._arrival = arrival
        self._first: float | None = None
        self._last = arrival

    def tokens(self, count: int) -> None:
        """`count` new tokens have arrived."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self._metrics.time_to_first_token.observe(now - self._arrival)
        else:
            self._metrics.inter_token_latency.observe(now - self._last)
        self._last = now
        self._metrics.generation_tokens.inc(count)

    def finish(self, reason: str) -> None:
        """The sequence has ended, with this finish_reason."""
        self.is_finished = True
        self._metrics.finished(reason)
        self._metrics.e2e_latency.observe(time.monotonic() - self._arrival)
        if self._first is not None:
            self._metrics.decode_time.observe(self._last - self._first)


class EngineCollector(Collector):
    """Reads the engine's snapshot at each scrape."""

    def __init__(self, *, model: str, stats: Callable[[], Any]):
        self._model = model
        self._stats = stats

    def describe(self) -> list[Metric]:
        """Nothing: registering must not call the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The engine's metrics as of its latest snapshot."""
        stats = self._stats()
        labels, values = ("model_name",), (self._model,)
        for name, (field, text) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels)
            gauge.add_metric(values, getattr(stats, field))
            yield gauge
        for name, (field, text) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            counter.add_metric(values, getattr(stats, field))
            yield counter
        for name, (sum_field, count_field, text) in SUMMARIES.items():
            summary = SummaryMetricFamily(PREFIX + name, text, labels=labels)
            summary.add_metric(values, count_value=getattr(stats, count_field), sum_value=getattr(stats, sum_field))
            yield summary
