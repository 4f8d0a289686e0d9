"""The metrics of GET /metrics, with their names and help. After the prefix, names are vLLM's where it has the metric.

The server observes each sequence while it streams (`SequenceTimer`); the engine's counts are read from its latest
snapshot at scrape time, so that a scrape never waits for a step. If several processes serve one engine, each keeps the
numbers it counts in a file of its own, and any of them reports the sums, so that a process that dies loses no counts.
"""

import array
import bisect
import itertools
import logging
import mmap
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxserve.request import FINISH_REASONS

logger = logging.getLogger(__name__)

type Family = type[CounterMetricFamily | GaugeMetricFamily]

if TYPE_CHECKING:
    Cells = memoryview[float]
else:  # not subscriptable before Python 3.14
    Cells = memoryview

# name -> (field of EngineStats, help)
GAUGES: Mapping[str, tuple[str, str]] = {
    "num_requests_running": ("num_running", "Sequences that run in the engine."),
    "num_requests_waiting": ("num_waiting", "Sequences that wait for the engine."),
    "kv_cache_usage_perc": ("kv_cache_usage", "Fraction of KV blocks in use; 1 is all."),
    "kv_cache_free_blocks": ("num_free_blocks", "KV blocks that hold nothing."),
    "kv_cache_cached_blocks": ("num_cached_blocks", "KV blocks that only the prefix cache holds."),
    "kv_cache_tokens": ("kv_tokens_held", "KV positions that hold a token of running sequences."),
    "kv_cache_allocated_positions": ("kv_positions_allocated", "KV positions of the blocks of running sequences."),
    "hbm_bandwidth_utilization_ratio": (
        "hbm_bandwidth_utilization",
        "Estimated fraction of the device's memory bandwidth that steps use; 0 where its peak is not known.",
    ),
}
# reason -> field of EngineStats
WAITING_REASONS: Mapping[str, str] = {
    "capacity": "num_waiting_new",
    "preempted": "num_waiting_preempted",
    "deferred": "num_waiting_deferred",
}
COUNTERS: Mapping[str, tuple[str, str]] = {
    "prefix_cache_queries_total": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits_total": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "num_preemptions_total": ("num_preemptions", "Sequences that gave their blocks back while running."),
    "compiles_total": ("num_compiles", "Step shapes compiled."),
    "recompiles_after_warmup_total": ("num_recompiles_after_warmup", "Step shapes compiled after warm-up: a bug."),
    "corrupted_requests_total": ("num_corrupted_requests", "Sequences that failed on NaN logits."),
}
DRAFTING: Mapping[str, tuple[str, str]] = {
    "spec_decode_num_drafts_total": ("spec_decode_num_drafts", "Times that the drafts of a sequence were verified."),
    "spec_decode_num_draft_tokens_total": ("spec_decode_num_draft_tokens", "Draft tokens verified."),
    "spec_decode_num_accepted_tokens_total": ("spec_decode_num_accepted_tokens", "Draft tokens accepted."),
}
"""Counters of an engine that drafts tokens."""
ACCEPTED_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
ACCEPTED_PER_POSITION_HELP = "Draft tokens accepted, by their position in the draft."
# Upper bounds of buckets: seconds of a step, tokens of a step, preemptions of a sequence.
STEP_TIMES = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTIONS = (0, 1, 2, 5, 10)


class EngineHistogram(NamedTuple):
    """A histogram kept by the engine: the fields of EngineStats that hold it, its help and its bounds.

    The field `counts` holds one number per bucket, the last without a bound; it is empty before the first value.
    """

    counts: str
    total: str
    text: str
    bounds: Sequence[float]


ENGINE_HISTOGRAMS: Mapping[str, EngineHistogram] = {
    "step_time_seconds": EngineHistogram("step_time_counts", "step_time_seconds", "Time of engine steps.", STEP_TIMES),
    "iteration_tokens_total": EngineHistogram(
        "step_tokens_counts", "num_step_tokens", "Tokens of engine steps, prompt and output.", STEP_TOKENS
    ),
    "request_num_preemptions": EngineHistogram(
        "preemption_counts", "num_ended_preemptions", "Preemptions of a sequence, at its end.", PREEMPTIONS
    ),
}

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_TOKEN_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.5, 5.0)

# Counters of the server itself: name -> help
SERVER_COUNTERS: Mapping[str, str] = {
    "prompt_tokens_total": "Prompt tokens of requests.",
    "generation_tokens_total": "Generated tokens.",
    "prompt_tokens_cached_total": "Prompt tokens of requests that the prefix cache held.",
    "unknown_request_fields_total": "Fields of requests that no route knows.",
}
REJECTIONS = "admission_rejections_total"
REJECTIONS_HELP = "Prompts that were refused because the queue was full, by the limit."
QUEUE_LIMIT = "max_num_queued_reqs"
HTTP_REQUESTS = "http_requests_total"
HTTP_REQUESTS_HELP = "HTTP requests by route, method and class of the status."
HTTP_DURATION = "http_request_duration_seconds"
HTTP_DURATION_HELP = "From an HTTP request to the end of its answer."
HTTP_DURATIONS = (0.1, 0.5, 1.0)
HTTP_STATUSES = ("1xx", "2xx", "3xx", "4xx", "5xx")
OTHER_ROUTE = ("OTHER", "none")
"""Method and path of the HTTP requests to no route."""
# name -> (help, upper bounds of the buckets)
HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token of a sequence.", _LATENCY),
    "inter_token_latency_seconds": (
        "Between two tokens of a sequence; those that are delivered together have come at equal intervals.",
        _TOKEN_LATENCY,
    ),
    "request_time_per_output_token_seconds": (
        "Mean time between the tokens of a sequence, of those with several.",
        _TOKEN_LATENCY,
    ),
    "e2e_request_latency_seconds": ("From arrival to the end of a sequence.", _LATENCY),
    "request_queue_time_seconds": ("From the arrival of a prompt to its first step.", _LATENCY),
    "request_prefill_time_seconds": ("From the first step of a prompt to its first token.", _LATENCY),
    "request_decode_time_seconds": ("From the first to the last token of a sequence.", _LATENCY),
    "request_inference_time_seconds": ("From the first step of a prompt to the last token of a sequence.", _LATENCY),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_prefill_kv_computed_tokens": ("Tokens of a prompt that the prefix cache did not hold.", _TOKENS),
    "request_generation_tokens": ("Generated tokens of a sequence.", _TOKENS),
    "request_max_num_generation_tokens": ("Generated tokens of a prompt's longest sequence.", _TOKENS),
    "request_params_max_tokens": ("Tokens that a sequence may generate.", _TOKENS),
    "request_params_n": ("Sequences of a prompt.", (1, 2, 5, 10, 20, 50, 100)),
}


class Metrics(Collector):
    """Every metric of one server. One thread counts.

    `model` is the value of the label `model_name` of all metrics. `stats` returns the latest snapshot of each
    engine by its number, an object with the attributes of EngineStats, without blocking. `cache_config` are the labels
    of `cache_config_info`, of each engine. `names` is the prefix of all names; with vLLM's, metrics also get the label
    `engine`, which its dashboards expect, and which metrics of engines have if there are several.
    `routes` are the methods and paths whose HTTP requests are counted, by names that have no prefix.
    `file` holds the numbers that are counted here; its siblings, `<same stem>-*`, belong to the other processes.
    """

    def __init__(
        self,
        *,
        model: str,
        stats: Callable[[], Mapping[str, Any]],
        cache_config: Mapping[str, str],
        names: Literal["jaxserve", "vllm"] = "jaxserve",
        routes: Iterable[tuple[str, str]] = (),
        file: pathlib.Path | None = None,
    ):
        self._prefix = f"{names}:"
        self._labels = {"model_name": model} | ({"engine": "0"} if names == "vllm" else {})
        self._stats = stats
        self._cache_config = cache_config
        self._file = file
        self._routes = [*dict.fromkeys(routes), OTHER_ROUTE]
        sizes = [1] * (len(SERVER_COUNTERS) + len(FINISH_REASONS) + 1)
        sizes += [len(bounds) + 2 for _, bounds in HISTOGRAMS.values()]
        sizes += [len(HTTP_STATUSES) + len(HTTP_DURATIONS) + 2] * len(self._routes)
        *firsts, self._num_cells = itertools.accumulate(sizes, initial=0)
        try:
            cells = _cells(self._num_cells, file)
        except OSError as error:
            logger.warning("%s: %s; the metrics of this process will not be in what others show", file, error.strerror)
            cells, self._file = _cells(self._num_cells, None), None
        counted = [*SERVER_COUNTERS, *FINISH_REASONS, REJECTIONS, *HISTOGRAMS, *self._routes]
        self._first: dict[object, int] = dict(zip(counted, firsts, strict=True))
        self._cells = cells
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count(self, name: str, count: float = 1.0) -> None:
        """Add to a counter: one of SERVER_COUNTERS, REJECTIONS, or the end of a sequence by its finish_reason."""
        self._cells[self._first[name]] += count

    def observe(self, name: str, value: float, count: int = 1) -> None:
        """Count a value `count` times in one of HISTOGRAMS."""
        self._add(self._first[name], HISTOGRAMS[name][1], value, count)

    def _add(self, first: int, bounds: Sequence[float], value: float, count: int) -> None:
        """Count a value in the histogram whose cells begin at `first`: one per bucket, the last without a bound, then
        one with the sum of all values.
        """
        self._cells[first + bisect.bisect_left(bounds, value)] += count
        self._cells[first + len(bounds) + 1] += value * count

    def answered(self, method: str, path: str, *, status: int, seconds: float) -> None:
        """Count an HTTP request to the route of this path, such as /v1/responses/{response_id}."""
        first = self._first.get((method, path), self._first[OTHER_ROUTE])
        self._cells[first + min(max(status // 100, 1), len(HTTP_STATUSES)) - 1] += 1.0
        self._add(first + len(HTTP_STATUSES), HTTP_DURATIONS, seconds, 1)

    def render(self) -> bytes:
        """Return the text exposition of all metrics."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Return nothing: registering must not call the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, those of the engine as of its latest snapshot."""
        families = _Families(self._prefix, self._labels)
        yield from self._collect_engines()
        cells = self._sums()
        for name, text in SERVER_COUNTERS.items():
            yield families.one(CounterMetricFamily, name, text, cells[self._first[name]])
        reasons = {reason: cells[self._first[reason]] for reason in FINISH_REASONS}
        yield families.split(
            CounterMetricFamily,
            "request_success_total",
            "Sequences that came to an end, by why they did.",
            "finished_reason",
            reasons,
        )
        yield families.split(
            CounterMetricFamily, REJECTIONS, REJECTIONS_HELP, "reason", {QUEUE_LIMIT: cells[self._first[REJECTIONS]]}
        )
        yield from self._collect_http(cells)
        for name, (text, bounds) in HISTOGRAMS.items():
            first = self._first[name]
            counts, total = cells[first : first + len(bounds) + 1], cells[first + len(bounds) + 1]
            yield families.histogram(name, text, bounds, counts, total)

    def _collect_http(self, cells: Sequence[float]) -> Iterator[Metric]:
        """Yield the counts of routes that have been asked for something."""
        model = self._labels["model_name"]
        labels = ("handler", "method", "model_name")
        requests = CounterMetricFamily(HTTP_REQUESTS, HTTP_REQUESTS_HELP, labels=(*labels, "status"))
        durations = HistogramMetricFamily(HTTP_DURATION, HTTP_DURATION_HELP, labels=labels)
        for method, path in self._routes:
            first = self._first[method, path]
            for index, status in enumerate(HTTP_STATUSES):
                if count := cells[first + index]:
                    requests.add_metric((path, method, model, status), count)
            first += len(HTTP_STATUSES)
            counts = cells[first : first + len(HTTP_DURATIONS) + 1]
            if any(counts):
                total = cells[first + len(counts)]
                durations.add_metric((path, method, model), buckets=_buckets(HTTP_DURATIONS, counts), sum_value=total)
        yield requests
        yield durations

    def _sums(self) -> Sequence[float]:
        if self._file is None:
            return self._cells.tolist()
        stem = self._file.name.rpartition("-")[0]
        contents = [file.read_bytes() for file in self._file.parent.glob(f"{stem}-*")]
        tables = [array.array("d", content) for content in contents if content]  # empty while it is being created
        return [sum(column) for column in zip(*tables, strict=True)]

    def _collect_engines(self) -> Iterator[Metric]:
        """Yield the metrics of all engines, which have a label each if there are several, or vLLM has it."""
        found: dict[str, Metric] = {}
        stats = self._stats()
        for engine, of_engine in stats.items():
            labels = {**self._labels, "engine": engine} if len(stats) > 1 or "engine" in self._labels else self._labels
            for metric in _Families(self._prefix, labels).of_engine(of_engine, self._cache_config):
                if found.setdefault(metric.name, metric) is not metric:
                    found[metric.name].samples += metric.samples
        yield from found.values()


class _Families(NamedTuple):
    """Makes metrics whose names begin alike, and that have labels in common."""

    prefix: str
    labels: Mapping[str, str]

    def one(self, kind: Family, name: str, text: str, value: float) -> Metric:
        """Make a metric with one value."""
        family = kind(self.prefix + name, text, labels=tuple(self.labels))
        family.add_metric(tuple(self.labels.values()), value)
        return family

    def split(self, kind: Family, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        """Make a metric with one value per value of the label `label`."""
        family = kind(self.prefix + name, text, labels=(*self.labels, label))
        for key, value in values.items():
            family.add_metric((*self.labels.values(), key), value)
        return family

    def histogram(self, name: str, text: str, bounds: Sequence[float], counts: Sequence[float], total: float) -> Metric:
        """Make a histogram."""
        family = HistogramMetricFamily(self.prefix + name, text, labels=tuple(self.labels))
        family.add_metric(tuple(self.labels.values()), buckets=_buckets(bounds, counts), sum_value=total)
        return family

    def of_engine(self, stats: Any, cache_config: Mapping[str, str]) -> Iterator[Metric]:
        """Yield the metrics of an engine."""
        for name, (field, text) in GAUGES.items():
            yield self.one(GaugeMetricFamily, name, text, getattr(stats, field))
        waiting = {reason: getattr(stats, field) for reason, field in WAITING_REASONS.items()}
        yield self.split(
            GaugeMetricFamily,
            "num_requests_waiting_by_reason",
            "Sequences that wait: for room (capacity), for room again after a preemption (preempted), or for their "
            "grammar to be compiled (deferred).",
            "reason",
            waiting,
        )
        yield self.split(
            GaugeMetricFamily,
            "kv_cache_held_bytes",
            "Memory of the KV blocks of running sequences, by what their layers attend to.",
            "layers",
            stats.kv_bytes_held,
        )
        labels = {**self.labels, **cache_config}
        cache = GaugeMetricFamily(
            self.prefix + "cache_config_info", "The KV cache, as labels; its value is 1.", labels=tuple(labels)
        )
        cache.add_metric(tuple(labels.values()), 1.0)
        yield cache
        for name, (field, text) in COUNTERS.items():
            yield self.one(CounterMetricFamily, name, text, getattr(stats, field))
        if per_position := stats.spec_decode_num_accepted_tokens_per_pos:
            for name, (field, text) in DRAFTING.items():
                yield self.one(CounterMetricFamily, name, text, getattr(stats, field))
            by_position = {str(position): count for position, count in enumerate(per_position)}
            yield self.split(
                CounterMetricFamily, ACCEPTED_PER_POSITION, ACCEPTED_PER_POSITION_HELP, "position", by_position
            )
        if stats.expert_tokens:
            by_expert = {str(expert): count for expert, count in enumerate(stats.expert_tokens)}
            yield self.split(
                CounterMetricFamily,
                "expert_tokens_total",
                "Tokens that an expert has had, in all layers together, with --enable-expert-parallel.",
                "expert",
                by_expert,
            )
        for name, kept in ENGINE_HISTOGRAMS.items():
            counts = getattr(stats, kept.counts) or (0,) * (len(kept.bounds) + 1)
            yield self.histogram(name, kept.text, kept.bounds, counts, getattr(stats, kept.total))


def _buckets(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    """Return the buckets of a histogram, each with all values up to its bound."""
    limits = [*map(floatToGoString, bounds), "+Inf"]
    return list(zip(limits, itertools.accumulate(counts), strict=True))


def _cells(count: int, file: pathlib.Path | None) -> Cells:
    """Return `count` float64 cells, initially 0; if a file is given, in this file, which outlives the process.

    Raises OSError now rather than when counting: writing to a sparse file on a full disk would end the process
    (SIGBUS).
    """
    size = count * 8
    if file is None:
        return memoryview(bytearray(size)).cast("d")
    with file.open("a+b") as stream:
        try:
            os.posix_fallocate(stream.fileno(), 0, size)
        except OSError:
            file.unlink()
            raise
        return memoryview(mmap.mmap(stream.fileno(), size)).cast("d")


class SequenceTimer:
    """Observes one sequence, from its `arrival` to its end. `arrival` and `now` are seconds of the monotonic clock."""

    __slots__ = ("_arrival", "_first", "_last", "_metrics", "is_finished", "num_tokens", "start")

    def __init__(self, metrics: Metrics, *, arrival: float):
        self.is_finished = False
        self.num_tokens = 0
        self.start: float | None = None
        """Time at which the first step of its prompt began."""
        self._metrics = metrics
        self._arrival = arrival
        self._first: float | None = None
        self._last = arrival

    def tokens(self, count: int, *, now: float) -> None:
        """Observe `count` new tokens."""
        metrics = self._metrics
        if self._first is None:
            self._first = now
            metrics.observe("time_to_first_token_seconds", now - self._arrival)
            if count > 1:
                metrics.observe("inter_token_latency_seconds", 0.0, count - 1)
        else:
            metrics.observe("inter_token_latency_seconds", (now - self._last) / count, count)
        self._last = now
        self.num_tokens += count
        metrics.count("generation_tokens_total", count)

    def finish(self, reason: str, *, now: float) -> None:
        """Observe the end of the sequence, with this finish_reason."""
        self.is_finished = True
        metrics = self._metrics
        metrics.count(reason)
        metrics.observe("e2e_request_latency_seconds", now - self._arrival)
        metrics.observe("request_generation_tokens", self.num_tokens)
        if self._first is not None:
            metrics.observe("request_decode_time_seconds", self._last - self._first)
            if self.start is not None:
                metrics.observe("request_inference_time_seconds", self._last - self.start)
            if self.num_tokens > 1:
                metrics.observe(
                    "request_time_per_output_token_seconds", (self._last - self._first) / (self.num_tokens - 1)
                )
