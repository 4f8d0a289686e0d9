import math

import numpy as np
import pytest

from jaxserve.bench.serving.client import Outcome
from jaxserve.bench.serving.load import LoadResult
from jaxserve.bench.serving.summary import (
    concurrency,
    latencies,
    meets,
    parse_slos,
    per_request,
    report,
    summarize,
    times,
)
from jaxserve.errors import InvalidRequest

START = 1000.0


def _whole(index: int, sent: float, chunks: list[float], ended: float, num_tokens: int | None = None) -> Outcome:
    return Outcome(
        index=index,
        due=START + sent,
        sent=START + sent,
        ended=START + ended,
        chunk_times=[START + chunk for chunk in chunks],
        num_prompt_tokens=10,
        num_cached_tokens=4,
        num_output_tokens=num_tokens or len(chunks),
        is_counted=True,
        finish_reason="length",
    )


def _failed(index: int, sent: float, ended: float, kind: str) -> Outcome:
    return Outcome(index=index, due=START, sent=START + sent, ended=START + ended, kind=kind, error=f"{kind} {index}")


def _summary(outcomes, **options):
    options.setdefault("slos", {})
    return summarize(LoadResult(outcomes, START, 0, 0.5), **options)


def test_the_times_of_one_request():
    measured = times(_whole(0, sent=1.0, chunks=[1.25, 1.5, 2.0], ended=2.25))
    assert measured.ttft == pytest.approx(250)
    assert measured.e2e == pytest.approx(1250)
    assert measured.tpot == pytest.approx(500)  # (1250 - 250) / 2
    assert measured.itl == pytest.approx([250, 500])


def test_tokens_count_for_tpot_not_chunks():
    measured = times(_whole(0, sent=0.0, chunks=[0.1, 0.2], ended=0.9, num_tokens=9))
    assert measured.tpot == pytest.approx(100)
    assert measured.itl == pytest.approx([100])


def test_one_token_has_no_time_per_output_token():
    measured = times(_whole(0, sent=0.0, chunks=[0.1], ended=0.1))
    assert measured.tpot is None
    assert measured.itl == []
    assert meets(measured, {"tpot": 0.001, "itl": 0.001})


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_percentiles_are_numpys(count):
    values = np.random.default_rng(count).exponential(50, count)
    found = latencies(values.tolist())
    assert found is not None
    assert found.count == count
    assert found.mean == pytest.approx(values.mean())
    assert (found.p50, found.p90, found.p99) == pytest.approx(tuple(np.percentile(values, [50, 90, 99])))
    assert found.max == values.max()


def test_rates_and_counts_of_a_run():
    outcomes = [
        _whole(0, sent=0.0, chunks=[0.5, 1.0], ended=1.0),
        _whole(1, sent=0.5, chunks=[1.0, 1.5, 2.0], ended=2.0),
        _failed(2, sent=1.0, ended=4.0, kind="timeout"),
    ]
    summary = _summary(outcomes, num_shortened=1)
    assert summary.duration == pytest.approx(4.0)
    assert (summary.num_requests, summary.num_completed, summary.num_failed) == (3, 2, 1)
    assert (summary.num_prompt_tokens, summary.num_cached_tokens, summary.num_output_tokens) == (20, 8, 5)
    assert summary.request_throughput == pytest.approx(0.5)
    assert summary.output_throughput == pytest.approx(1.25)
    assert summary.total_throughput == pytest.approx(6.25)
    assert summary.peak_concurrency == 2
    assert summary.tokens_per_chunk == 1.0
    assert summary.client_cpu_share == pytest.approx(0.125)
    assert summary.latencies["ttft"].mean == pytest.approx(500)
    assert summary.latencies["itl"].count == 3
    assert summary.num_shortened == 1


def test_requests_that_follow_one_another_are_not_at_once():
    outcomes = [_whole(0, sent=0.0, chunks=[1.0], ended=1.0), _whole(1, sent=1.0, chunks=[2.0], ended=2.0)]
    assert max(running for _, running in concurrency(outcomes)) == 1


def test_errors_are_counted_by_kind_and_shown():
    kinds = ["HTTP 429", "timeout", "HTTP 429", "connection"]
    summary = _summary([_failed(index, 0.0, 1.0, kind) for index, kind in enumerate(kinds)])
    assert [(failure.kind, failure.count) for failure in summary.failures] == [
        ("HTTP 429", 2),
        ("timeout", 1),
        ("connection", 1),
    ]
    assert summary.failures[0].example == "HTTP 429 0"
    text = report(summary)
    assert "HTTP 429 0" in text
    assert "0 / 4" in text


def test_goodput_counts_those_that_meet_every_objective():
    outcomes = [
        _whole(0, sent=0.0, chunks=[0.1, 0.2], ended=0.2),
        _whole(1, sent=0.0, chunks=[0.3, 0.4], ended=0.4),  # first token too late
        _whole(2, sent=0.0, chunks=[0.1, 1.0], ended=1.0),  # next token too late
        _failed(3, sent=0.0, ended=2.0, kind="timeout"),
    ]
    goodput = _summary(outcomes, slos={"ttft": 200.0, "tpot": 150.0}).goodput
    assert goodput is not None
    assert goodput.share == 0.25
    assert goodput.requests_per_second == pytest.approx(0.5)
    assert _summary(outcomes).goodput is None


def test_an_objective_may_be_met_exactly():
    measured = times(_whole(0, sent=0.0, chunks=[0.25], ended=0.5))
    assert meets(measured, {"ttft": 250.0, "e2e": 500.0})
    assert not meets(measured, {"e2e": 499.0})


def test_objectives_are_parsed():
    assert parse_slos(["ttft:200", "e2e:1.5e3"]) == {"ttft": 200.0, "e2e": 1500.0}


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:fast", "ttft:0", "ttft:-1", "latency:5", "", "ttft:nan"])
def test_what_is_no_objective_is_refused(text):
    with pytest.raises(InvalidRequest) as refusal:
        parse_slos([text])
    assert refusal.value.param == "goodput"


def test_a_run_without_requests_has_a_summary():
    summary = _summary([])
    assert summary.duration == 0
    assert summary.latencies == {}
    assert "0 / 0" in report(summary)


def test_each_request_is_reported():
    rows = per_request([_whole(0, 0.5, [1.0], 1.5), _failed(1, 0.0, 1.0, "timeout")], START)
    assert rows[0]["sent"] == pytest.approx(0.5)
    assert rows[0]["ttft_ms"] == pytest.approx(500)
    assert math.isclose(rows[0]["seconds"], 1.0)
    assert rows[1]["error"] == "timeout: timeout 1"
