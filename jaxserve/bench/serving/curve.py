"""`jaxserve bench load-curve`: what clients see of a server at shares of its capacity, by kind of arrivals.

The capacity is measured first: the requests a second that are answered while a fixed number of them is kept running.
"""

import dataclasses
import itertools
import math
import pathlib
import sys
from collections.abc import Sequence

import msgspec
import uvloop

from jaxserve.bench.report import table
from jaxserve.bench.serving.client import INTERRUPTED
from jaxserve.bench.serving.load import LoadResult
from jaxserve.bench.serving.options import ServingOptions
from jaxserve.bench.serving.plots import save_curve
from jaxserve.bench.serving.run import ServingRun, measure
from jaxserve.bench.serving.summary import Goodput, Summary, summarize
from jaxserve.bench.serving.workloads import read_workload
from jaxserve.errors import InvalidRequest

BURSTINESS = {"poisson": 1.0, "bursts": 0.25}
"""Shapes of the gamma-distributed gaps. At 0.25 half of the gaps are below a fifth of the mean."""

WINDOW = 1 / 3
"""Share of the first run after which a server counts as full: it has filled up and the first requests have ended."""

AT_ONCE = 1e9
"""Speed of a trace at which all of its requests are there at once."""

MOST_REQUESTS = 100_000
"""Requests of the run that measures the capacity: more than a server answers in its time."""

HEADER = (
    *("arrivals", "load", "req/s", "answered/s", "tok/s", "TTFT p50", "p90", "p99", "ITL p50", "p90", "p99"),
    *("failed",),
)


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What a full server does of one workload in a second."""

    requests: float
    tokens: float


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One run: requests arrive at `rate` a second, which is `load` of the capacity."""

    arrivals: str
    load: float
    rate: float
    summary: Summary
    goodputs: list[Goodput]


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """All runs, as --save-json writes them, and the capacity for each workload."""

    model: str
    seconds: float
    capacities: dict[str, Capacity]
    points: list[Point]


class CurveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which runs there are, each of so many `seconds`. `levels` are objectives as `parse_slos` returns them; `trace` is
    a file in Azure's or Mooncake's format; `at_once` is how many requests fill the server.

    Raises InvalidRequest if the trace cannot be read.
    """

    loads: Sequence[float]
    seconds: float
    levels: Sequence[dict[str, float]]
    trace: str | None
    at_once: int

    def __post_init__(self) -> None:
        if self.trace is not None:
            read_workload(self.with_trace(ServingOptions()), None)

    def with_trace(self, options: ServingOptions) -> ServingOptions:
        """Return options whose requests are those of the trace."""
        kind = "mooncake" if str(self.trace).endswith(".jsonl") else "azure"
        return dataclasses.replace(options, workload=kind, file=self.trace, output_len=None)


def run(options: ServingOptions, curve: CurveOptions) -> int:
    """Measure, print the table and write the requested files. Return 0, or 1 if a request failed.

    Raises InvalidRequest.
    """
    measured = _measure(options, curve)
    print(report(measured))
    if options.save_json is not None:
        pathlib.Path(options.save_json).write_bytes(msgspec.json.format(msgspec.json.encode(measured)) + b"\n")
    if options.save_plot is not None:
        save_curve(measured, pathlib.Path(options.save_plot))
    return int(any(point.summary.num_failed for point in measured.points))


def draw(saved: pathlib.Path, picture: str | None) -> None:
    """Print and draw what --save-json wrote. Raises InvalidRequest."""
    try:
        curve = msgspec.json.decode(saved.read_bytes(), type=Curve)
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"no load curve in {saved}: {error}", param="draw") from error
    print(report(curve))
    if picture is not None:
        save_curve(curve, pathlib.Path(picture))


def report(curve: Curve) -> str:
    """Format the runs as a table, after a line for the capacity of each workload."""
    lines = [
        f"capacity, {name}: {found.requests:.2f} requests/s, {found.tokens:.0f} output tok/s"
        for name, found in curve.capacities.items()
    ]
    levels = [", ".join(f"{name} <= {limit:g} ms" for name, limit in one.slos.items()) for one in _goodputs(curve)]
    rows = []
    for point in curve.points:
        summary = point.summary
        spread = [
            f"{value:.1f}"
            for name in ("ttft", "itl")
            for value in (getattr(summary.latencies.get(name), key, math.nan) for key in ("p50", "p90", "p99"))
        ]
        rows.append(
            [
                *(point.arrivals, f"{point.load:g}", f"{point.rate:.2f}", f"{summary.request_throughput:.2f}"),
                *(f"{summary.output_throughput:.0f}", *spread, str(summary.num_failed)),
                *(f"{one.requests_per_second:.2f} ({one.share:.0%})" for one in point.goodputs),
            ]
        )
    names = [f"good/s {chr(ord('A') + index)}" for index in range(len(levels))]
    legend = [f"{chr(ord('A') + index)}: {level}" for index, level in enumerate(levels)]
    return "\n".join([*lines, "", table([*HEADER, *names], rows), *legend])


def _goodputs(curve: Curve) -> list[Goodput]:
    return curve.points[0].goodputs if curve.points else []


def capacity_of(result: LoadResult, seconds: float) -> Capacity:
    """Return the rates between the first third and the end of the time in which requests were sent: `seconds`, or less
    if there were no more of them.

    Requests are output tokens over those of a mean request: few of them may end in that time. Raises InvalidRequest if
    nothing was answered.
    """
    whole = [outcome for outcome in result.outcomes if outcome.kind is None]
    if not result.num_unsent:
        seconds = max(outcome.sent for outcome in result.outcomes) - result.start
    begin, end = result.start + WINDOW * seconds, result.start + seconds
    num_tokens = 0.0
    for outcome in whole:
        within = sum(begin <= time < end for time in outcome.chunk_times)
        num_tokens += outcome.num_output_tokens * within / len(outcome.chunk_times)
    if not num_tokens:
        message = f"no output in {(1 - WINDOW) * seconds:.1f} s: requests take longer than that, are too few, or fail"
        if failed := [outcome for outcome in result.outcomes if outcome.kind is not None]:
            message += f" ({failed[0].kind}: {failed[0].error})"
        raise InvalidRequest(message, param="seconds")
    rate = num_tokens / (end - begin)
    return Capacity(requests=rate * len(whole) / sum(outcome.num_output_tokens for outcome in whole), tokens=rate)


def _measure(options: ServingOptions, curve: CurveOptions) -> Curve:
    workloads = {"random": options}
    if curve.trace is not None:
        traced = curve.with_trace(options)
        workloads[traced.workload] = traced
    capacities: dict[str, Capacity] = {}
    points: list[Point] = []
    seeds = itertools.count(options.seed)  # a server may know the prompts of equal seeds
    model = ""
    for name, workload in workloads.items():
        full = _run(_filling(workload, curve, seed=next(seeds)))
        model, capacity = full.model, capacity_of(full.result, curve.seconds)
        capacities[name] = capacity
        print(f"capacity, {name}: {capacity.requests:.2f} requests/s", file=sys.stderr)
        workload = dataclasses.replace(workload, ignore_eos=full.exact_length, num_warmups=0)
        for arrivals, load in itertools.product(BURSTINESS if name == "random" else (name,), curve.loads):
            rate = load * capacity.requests
            timed = _timed(workload, arrivals, rate=rate, num_requests=math.ceil(rate * curve.seconds))
            found = _run(dataclasses.replace(timed, seed=next(seeds)))
            goodputs = [summarize(found.result, slos=slos).goodput for slos in curve.levels]
            points.append(
                Point(
                    arrivals=arrivals,
                    load=load,
                    rate=rate,
                    summary=found.summary,
                    goodputs=[goodput for goodput in goodputs if goodput is not None],
                )
            )
    return Curve(model=model, seconds=curve.seconds, capacities=capacities, points=points)


def _run(options: ServingOptions) -> ServingRun:
    """Run one load. Raises KeyboardInterrupt if a signal has ended it, so that no other begins."""
    run = uvloop.run(measure(options, slos={}))
    if any((outcome.kind, outcome.error) == INTERRUPTED for outcome in run.result.outcomes):
        raise KeyboardInterrupt
    return run


def _filling(workload: ServingOptions, curve: CurveOptions, *, seed: int) -> ServingOptions:
    """Return the run that keeps `at_once` requests running."""
    return dataclasses.replace(
        workload,
        seed=seed,
        num_requests=MOST_REQUESTS,
        duration=curve.seconds,
        trace_speed=AT_ONCE,
        max_concurrency=curve.at_once,
    )


def _timed(workload: ServingOptions, arrivals: str, *, rate: float, num_requests: int) -> ServingOptions:
    """Return a run whose requests arrive at this rate: a trace keeps its pattern and is played faster or slower."""
    if (burstiness := BURSTINESS.get(arrivals)) is not None:
        return dataclasses.replace(workload, num_requests=num_requests, request_rate=rate, burstiness=burstiness)
    workload = dataclasses.replace(workload, num_requests=num_requests)
    calls = read_workload(workload, None)
    recorded = (calls[-1].arrival or 0.0) / len(calls)
    return dataclasses.replace(workload, trace_speed=max(rate * recorded, 1 / AT_ONCE))
