"""What GET /metrics shows: the names and help of every metric. Names follow vLLM's dashboards.

The server observes each sequence while it streams (`SequenceTimer`); what the engine counts is read from its latest
snapshot at scrape time, so that a scrape never waits for a step. Where several processes serve one engine, each has the
numbers it counts in a file of its own, and any of them shows the sums: a process that dies takes nothing with it.
"""

import array
import bisect
import itertools
import logging
import mmap
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxserve.request import FINISH_REASONS

logger = logging.getLogger(__name__)

PREFIX = "jaxserve:"

if TYPE_CHECKING:
    Cells = memoryview[float]
else:  # it cannot be subscripted before Python 3.14
    Cells = memoryview

# name -> (field of EngineStats, help)
GAUGES: Mapping[str, tuple[str, str]] = {
    "num_requests_running": ("num_running", "Sequences that run in the engine."),
    "num_requests_waiting": ("num_waiting", "Sequences that wait for the engine."),
    "kv_cache_usage_perc": ("kv_cache_usage", "Share of KV blocks in use; 1 is all."),
    "kv_cache_tokens": ("kv_tokens_held", "KV positions that hold a token of running sequences."),
    "kv_cache_allocated_positions": ("kv_positions_allocated", "KV positions of the blocks of running sequences."),
    "hbm_bandwidth_utilization_ratio": (
        "hbm_bandwidth_utilization",
        "Estimated share of the device's memory bandwidth that steps use; 0 where its peak is not known.",
    ),
}
HELD_BYTES = "kv_cache_held_bytes"
HELD_BYTES_HELP = "Memory of the KV blocks of running sequences, by what their layers attend to."
COUNTERS: Mapping[str, tuple[str, str]] = {
    "prefix_cache_queries_total": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits_total": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "num_preemptions_total": ("num_preemptions", "Sequences that gave their blocks back while running."),
    "compiles_total": ("num_compiles", "Step shapes compiled."),
    "recompiles_after_warmup_total": ("num_recompiles_after_warmup", "Step shapes compiled after warm-up: a bug."),
    "corrupted_requests_total": ("num_corrupted_requests", "Sequences that failed on NaN logits."),
}
# Upper bounds of buckets: seconds of a step, tokens of a step.
STEP_TIMES = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
STEP_TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class EngineHistogram(NamedTuple):
    """A histogram that the engine keeps: the fields of EngineStats that have it, and what it shows."""

    counts: str
    total: str
    text: str
    bounds: Sequence[float]


ENGINE_HISTOGRAMS: Mapping[str, EngineHistogram] = {
    "step_time_seconds": EngineHistogram("step_time_counts", "step_time_seconds", "Time of engine steps.", STEP_TIMES),
    "iteration_tokens_total": EngineHistogram(
        "step_tokens_counts", "num_step_tokens", "Tokens of engine steps, prompt and output.", STEP_TOKENS
    ),
}

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.5, 5.0)

# What the server counts itself. name -> help
SERVER_COUNTERS: Mapping[str, str] = {
    "prompt_tokens_total": "Prompt tokens of requests.",
    "generation_tokens_total": "Generated tokens.",
    "unknown_request_fields_total": "Fields of requests that no route knows.",
}
# name -> (help, upper bounds of the buckets)
HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token of a sequence.", _LATENCY),
    "inter_token_latency_seconds": ("Between two outputs of a sequence.", _TOKEN_LATENCY),
    "e2e_request_latency_seconds": ("From arrival to the end of a sequence.", _LATENCY),
    "request_queue_time_seconds": ("From the arrival of a prompt to its first step.", _LATENCY),
    "request_prefill_time_seconds": ("From the first step of a prompt to its first token.", _LATENCY),
    "request_decode_time_seconds": ("From the first to the last token of a sequence.", _LATENCY),
}
SUCCESS = "request_success_total"
SUCCESS_HELP = "Sequences that came to an end, by why they did."


class Counter:
    """A number that grows: one cell."""

    __slots__ = ("_cells", "_index")

    def __init__(self, cells: Cells, index: int):
        self._cells = cells
        self._index = index

    def inc(self, count: float = 1.0) -> None:
        """Add to it."""
        self._cells[self._index] += count


class Histogram:
    """A cell for each bucket, the last of them without a bound, then one with the sum of all values."""

    __slots__ = ("_bounds", "_cells", "_first")

    def __init__(self, cells: Cells, first: int, bounds: Sequence[float]):
        self._cells = cells
        self._first = first
        self._bounds = bounds

    def observe(self, value: float) -> None:
        """Count a value, in seconds."""
        cells, first, bounds = self._cells, self._first, self._bounds
        cells[first + bisect.bisect_left(bounds, value)] += 1.0
        cells[first + len(bounds) + 1] += value


class Metrics(Collector):
    """Every metric of one server. `model` is the label `model_name` of all of them. One thread counts.

    `stats` returns the engine's latest snapshot, an object with the attributes of EngineStats, without waiting. `file`
    holds the numbers that are counted here; others like it, `<same stem>-*`, belong to the other processes.
    """

    def __init__(self, *, model: str, stats: Callable[[], Any], file: pathlib.Path | None = None):
        self._model = model
        self._stats = stats
        self._file = file
        sizes = [1] * (len(SERVER_COUNTERS) + len(FINISH_REASONS))
        sizes += [len(bounds) + 2 for _, bounds in HISTOGRAMS.values()]
        *firsts, self._num_cells = itertools.accumulate(sizes, initial=0)
        try:
            cells = _cells(self._num_cells, file)
        except OSError as error:
            logger.warning("%s: %s; the metrics of this process will not be in what others show", file, error.strerror)
            cells, self._file = _cells(self._num_cells, None), None
        names = [*SERVER_COUNTERS, *FINISH_REASONS, *HISTOGRAMS]
        self._first = dict(zip(names, firsts, strict=True))
        self._cells = cells
        self._registry = CollectorRegistry()
        self._registry.register(self)

        self.prompt_tokens = Counter(cells, self._first["prompt_tokens_total"])
        self.generation_tokens = Counter(cells, self._first["generation_tokens_total"])
        self.unknown_fields = Counter(cells, self._first["unknown_request_fields_total"])
        self.time_to_first_token = self._histogram("time_to_first_token_seconds")
        self.inter_token_latency = self._histogram("inter_token_latency_seconds")
        self.e2e_latency = self._histogram("e2e_request_latency_seconds")
        self.queue_time = self._histogram("request_queue_time_seconds")
        self.prefill_time = self._histogram("request_prefill_time_seconds")
        self.decode_time = self._histogram("request_decode_time_seconds")

    def _histogram(self, name: str) -> Histogram:
        return Histogram(self._cells, self._first[name], HISTOGRAMS[name][1])

    def finished(self, reason: str) -> None:
        """Count a sequence that ended with this finish_reason."""
        self._cells[self._first[reason]] += 1.0

    def render(self) -> bytes:
        """The text exposition of all metrics."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing: registering must not call the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics, those of the engine as of its latest snapshot."""
        yield from self._collect_engine()
        labels, values = ("model_name",), (self._model,)
        cells = self._sums()
        for name, text in SERVER_COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            counter.add_metric(values, cells[self._first[name]])
            yield counter
        success = CounterMetricFamily(PREFIX + SUCCESS, SUCCESS_HELP, labels=(*labels, "finished_reason"))
        for reason in FINISH_REASONS:
            success.add_metric((*values, reason), cells[self._first[reason]])
        yield success
        for name, (text, bounds) in HISTOGRAMS.items():
            first = self._first[name]
            counts = itertools.accumulate(cells[first : first + len(bounds) + 1])
            histogram = HistogramMetricFamily(PREFIX + name, text, labels=labels)
            histogram.add_metric(
                values,
                buckets=list(zip([*map(floatToGoString, bounds), "+Inf"], counts, strict=True)),
                sum_value=cells[first + len(bounds) + 1],
            )
            yield histogram

    def _sums(self) -> Sequence[float]:
        if self._file is None:
            return self._cells.tolist()
        stem = self._file.name.rpartition("-")[0]
        contents = [file.read_bytes() for file in self._file.parent.glob(f"{stem}-*")]
        tables = [array.array("d", content) for content in contents if content]  # empty: it is just being made
        return [sum(column) for column in zip(*tables, strict=True)]

    def _collect_engine(self) -> Iterator[Metric]:
        stats = self._stats()
        labels, values = ("model_name",), (self._model,)
        for name, (field, text) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels)
            gauge.add_metric(values, getattr(stats, field))
            yield gauge
        held = GaugeMetricFamily(PREFIX + HELD_BYTES, HELD_BYTES_HELP, labels=(*labels, "layers"))
        for layers, num_bytes in stats.kv_bytes_held.items():
            held.add_metric((*values, layers), num_bytes)
        yield held
        for name, (field, text) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            counter.add_metric(values, getattr(stats, field))
            yield counter
        for name, kept in ENGINE_HISTOGRAMS.items():
            counts = getattr(stats, kept.counts) or (0,) * len(kept.bounds)
            histogram = HistogramMetricFamily(PREFIX + name, kept.text, labels=labels)
            histogram.add_metric(
                values,
                buckets=[
                    *zip(map(floatToGoString, kept.bounds), itertools.accumulate(counts), strict=True),
                    ("+Inf", stats.num_steps),
                ],
                sum_value=getattr(stats, kept.total),
            )
            yield histogram


def _cells(count: int, file: pathlib.Path | None) -> Cells:
    """`count` float64 numbers, in a file that keeps them when the process ends, if one is given. They start at 0.

    Raises OSError, now and not when they are first counted: a file with holes that the disk has no room for would be
    the end of the process then (SIGBUS).
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
    """Observes one sequence, from its `arrival` to its end. `now` and it are seconds of the monotonic clock."""

    __slots__ = ("_arrival", "_first", "_last", "_metrics", "is_finished")

    def __init__(self, metrics: Metrics, *, arrival: float):
        self.is_finished = False
        self._metrics = metrics
        self._arrival = arrival
        self._first: float | None = None
        self._last = arrival

    def tokens(self, count: int, *, now: float) -> None:
        """`count` new tokens have arrived."""
        if self._first is None:
            self._first = now
            self._metrics.time_to_first_token.observe(now - self._arrival)
        else:
            self._metrics.inter_token_latency.observe(now - self._last)
        self._last = now
        self._metrics.generation_tokens.inc(count)

    def finish(self, reason: str, *, now: float) -> None:
        """The sequence has ended, with this finish_reason."""
        self.is_finished = True
        self._metrics.finished(reason)
        self._metrics.e2e_latency.observe(now - self._arrival)
        if self._first is not None:
            self._metrics.decode_time.observe(self._last - self._first)
