"""Aggregate the outcomes of a load: latencies, goodput, rates and errors, as a struct (for JSON) and as tables."""

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxserve.bench.report import table
from jaxserve.bench.serving.client import Outcome
from jaxserve.bench.serving.load import LoadResult
from jaxserve.errors import InvalidRequest

METRICS = {"ttft": "time to first token", "tpot": "time per output token", "itl": "inter-token latency", "e2e": "whole"}
"""The latency metrics and their names in tables. `itl` is measured per chunk, the others once per request."""


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics over the completely answered requests, in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that met every objective (`slos`, in milliseconds): per second, and as a fraction of all requests
    sent.
    """

    slos: dict[str, float]
    requests_per_second: float
    share: float


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Number of errors of one kind, and the message of the first."""

    kind: str
    count: int
    example: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one run. Rates are over `duration`, from the start to the end of the last request.

    `num_shortened` requests were cut to the context (`workloads.fit`). `send_delay` is how late requests were sent, in
    milliseconds: if it is not small compared with the latencies, the client was the bottleneck. `client_cpu_share` is
    the CPU time of the client divided by the duration.
    """

    duration: float
    num_requests: int
    num_completed: int
    num_failed: int
    num_unsent: int
    num_shortened: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    is_counted_by_server: bool
    request_throughput: float
    output_throughput: float
    total_throughput: float
    peak_concurrency: int
    tokens_per_chunk: float | None
    latencies: dict[str, Latencies]
    goodput: Goodput | None
    failures: list[Failure]
    send_delay: Latencies | None
    client_cpu_share: float


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of one request in milliseconds. TPOT is (e2e - ttft) / (tokens - 1), hence None for a single token."""

    ttft: float
    tpot: float | None
    itl: list[float]
    e2e: float


def times(outcome: Outcome) -> Times:
    """Return the latencies of a completely answered request."""
    chunks = outcome.chunk_times
    ttft = (chunks[0] - outcome.sent) * 1e3
    e2e = (outcome.ended - outcome.sent) * 1e3
    num_after_first = outcome.num_output_tokens - 1
    return Times(
        ttft=ttft,
        tpot=(e2e - ttft) / num_after_first if num_after_first > 0 else None,
        itl=[(later - earlier) * 1e3 for earlier, later in itertools.pairwise(chunks)],
        e2e=e2e,
    )


def latencies(values: Sequence[float]) -> Latencies | None:
    """Return the mean and percentiles (linear interpolation) of these milliseconds, or None if there are none."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return Latencies(
        count=len(values), mean=float(np.mean(values)), p50=p50, p90=p90, p99=p99, max=float(np.max(values))
    )


def parse_slos(texts: Iterable[str]) -> dict[str, float]:
    """Parse objectives such as "ttft:200", in milliseconds. Raises InvalidRequest."""
    slos = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            slos[name] = float(limit)
        except ValueError:
            slos[name] = 0.0
        if name not in METRICS or not slos[name] > 0:
            names = ", ".join(METRICS)
            message = f"{text!r} is not NAME:MILLISECONDS, with one of {names}"
            raise InvalidRequest(message, param="goodput")
    return slos


def meets(measured: Times, slos: Mapping[str, float]) -> bool:
    """Return true if a request met every objective; the one for `itl` applies to its mean gap."""
    values = {
        "ttft": measured.ttft,
        "tpot": measured.tpot or 0.0,
        "itl": float(np.mean(measured.itl)) if measured.itl else 0.0,
        "e2e": measured.e2e,
    }
    return all(values[name] <= limit for name, limit in slos.items())


def summarize(result: LoadResult, *, slos: Mapping[str, float], num_shortened: int = 0) -> Summary:
    """Summarize a load, with goodput if there are objectives."""
    outcomes = result.outcomes
    whole = [outcome for outcome in outcomes if outcome.kind is None]
    measured = [times(outcome) for outcome in whole]
    duration = max((outcome.ended for outcome in outcomes), default=result.start) - result.start
    found = {
        "ttft": [one.ttft for one in measured],
        "tpot": [one.tpot for one in measured if one.tpot is not None],
        "itl": [gap for one in measured for gap in one.itl],
        "e2e": [one.e2e for one in measured],
    }
    num_prompt = sum(outcome.num_prompt_tokens for outcome in whole)
    num_output = sum(outcome.num_output_tokens for outcome in whole)
    num_chunks = sum(len(outcome.chunk_times) for outcome in whole)
    num_good = sum(meets(one, slos) for one in measured)
    return Summary(
        duration=duration,
        num_requests=len(outcomes),
        num_completed=len(whole),
        num_failed=len(outcomes) - len(whole),
        num_unsent=result.num_unsent,
        num_shortened=num_shortened,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=sum(outcome.num_cached_tokens for outcome in whole),
        num_output_tokens=num_output,
        is_counted_by_server=all(outcome.is_counted for outcome in whole),
        request_throughput=_rate(len(whole), duration),
        output_throughput=_rate(num_output, duration),
        total_throughput=_rate(num_prompt + num_output, duration),
        peak_concurrency=max((running for _, running in concurrency(outcomes)), default=0),
        tokens_per_chunk=num_output / num_chunks if num_chunks else None,
        latencies={name: some for name in METRICS if (some := latencies(found[name])) is not None},
        goodput=Goodput(
            slos=dict(slos),
            requests_per_second=_rate(num_good, duration),
            share=num_good / len(outcomes) if outcomes else 0.0,
        )
        if slos
        else None,
        failures=_failures(outcomes),
        send_delay=latencies([(outcome.sent - outcome.due) * 1e3 for outcome in outcomes]),
        client_cpu_share=_rate(result.cpu_seconds, duration),
    )


def concurrency(outcomes: Sequence[Outcome]) -> list[tuple[float, int]]:
    """Return the number of running requests after each time (perf_counter seconds) at which it changes."""
    changes = sorted([(one.sent, 1) for one in outcomes] + [(one.ended, -1) for one in outcomes])
    running, steps = 0, []
    for time, change in changes:
        running += change
        steps.append((time, running))
    return steps


def report(summary: Summary) -> str:
    """Format the summary as two tables, followed by a table of errors if there were any."""
    count = "" if summary.is_counted_by_server else " (chunks: the server sent no usage)"
    rows = [
        ["requests answered / sent", f"{summary.num_completed} / {summary.num_requests}"],
        ["failed", str(summary.num_failed)],
        ["duration", f"{summary.duration:.1f} s"],
        ["prompt tokens", f"{summary.num_prompt_tokens}"],
        ["of these cached", f"{summary.num_cached_tokens}"],
        [f"output tokens{count}", f"{summary.num_output_tokens}"],
        ["requests a second", f"{summary.request_throughput:.2f}"],
        ["output tokens a second", f"{summary.output_throughput:.1f}"],
        ["all tokens a second", f"{summary.total_throughput:.1f}"],
        ["most at once", f"{summary.peak_concurrency}"],
        ["CPU of this client", f"{summary.client_cpu_share:.1%}"],
    ]
    if summary.num_unsent:
        rows.insert(2, ["not sent", str(summary.num_unsent)])
    if summary.num_shortened:
        rows.insert(2, ["shortened to fit the context", str(summary.num_shortened)])
    if summary.goodput is not None:
        slos = ", ".join(f"{name} <= {limit:g} ms" for name, limit in summary.goodput.slos.items())
        rows.append([f"goodput, requests a second ({slos})", f"{summary.goodput.requests_per_second:.2f}"])
        rows.append(["share of requests that are good", f"{summary.goodput.share:.1%}"])
    named = {METRICS[name]: values for name, values in summary.latencies.items()}
    if summary.send_delay is not None:
        named["sent too late by"] = summary.send_delay
    spread = [
        [name, *(f"{value:.2f}" for value in (some.mean, some.p50, some.p90, some.p99, some.max))]
        for name, some in named.items()
    ]
    tables = [table(["", ""], rows), table(["milliseconds", "mean", "p50", "p90", "p99", "max"], spread)]
    if summary.failures:
        failures = [[failure.kind, str(failure.count), failure.example] for failure in summary.failures]
        tables.append(table(["error", "count", "the first"], failures))
    return "\n\n".join(tables)


def per_request(outcomes: Sequence[Outcome], start: float) -> list[dict[str, Any]]:
    """Return each request's times as plain data for the JSON file; `sent` is in seconds after the start."""
    rows = []
    for one in outcomes:
        row: dict[str, Any] = {"index": one.index, "sent": one.sent - start, "seconds": one.ended - one.sent}
        row |= {"num_prompt_tokens": one.num_prompt_tokens, "num_output_tokens": one.num_output_tokens}
        if one.kind is None:
            measured = times(one)
            row |= {"ttft_ms": measured.ttft, "tpot_ms": measured.tpot, "finish_reason": one.finish_reason}
        else:
            row |= {"error": f"{one.kind}: {one.error}"}
        rows.append(row)
    return rows


def _failures(outcomes: Iterable[Outcome]) -> list[Failure]:
    failed = [outcome for outcome in outcomes if outcome.kind is not None]
    counts = collections.Counter(outcome.kind for outcome in failed)
    first = {outcome.kind: outcome.error for outcome in reversed(failed)}
    return [Failure(kind=kind or "", count=n, example=first[kind] or "") for kind, n in counts.most_common()]


def _rate(amount: float, duration: float) -> float:
    return amount / duration if duration > 0 else 0.0
