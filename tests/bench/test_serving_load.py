"""The load client against a scripted server, whose timing is known."""

import asyncio
import dataclasses
import json
import signal
import statistics
import subprocess
import sys
import time
import types

import pytest
from scripted_server import Reply, scripted
from tiny_tokenizer import byte_level
from waiting import PATIENCE, until, wait_until

from jaxserve import cli
from jaxserve.bench.serving import client, load
from jaxserve.bench.serving.options import ServingOptions
from jaxserve.bench.serving.run import measure
from jaxserve.errors import InvalidRequest


class Clock:
    """A clock that advances only where the script says so, once the client has read it for the previous events."""

    def __init__(self, monkeypatch):
        self._now = 0.0
        self._num_reads = self._num_reads_before = 0
        stand_in = types.SimpleNamespace(perf_counter=self._read, process_time=time.process_time)
        for module in (client, load):
            monkeypatch.setattr(module, "time", stand_in)

    def _read(self):
        self._num_reads += 1
        return self._now

    async def sleep(self, seconds):
        await until(lambda: self._num_reads > self._num_reads_before)
        self._now += seconds
        self._num_reads_before = self._num_reads


def _measure(server, *, slos=None, **options):
    fields = {"vocab_size": 100, "num_requests": 8, "input_len": 10, "output_len": 5, "progress": False} | options
    return asyncio.run(measure(ServingOptions(url=server.url, **fields), slos=slos or {}))


def _sent(server):
    """Return the bodies of the requests sent, without the warm-up."""
    return [body for _, path, body in server.requests if path != "/v1/models"][1:]


def test_latencies_are_those_of_the_script(monkeypatch):
    clock = Clock(monkeypatch)
    with scripted(lambda path, body: Reply(num_tokens=6, ttft=0.08, gap=0.03)) as server:
        server.sleep = clock.sleep
        summary = _measure(server, num_requests=6, max_concurrency=1, slos={"ttft": 80.1, "tpot": 30.1}).summary
    assert summary.num_completed == 6
    for name, milliseconds in (("ttft", 80), ("tpot", 30), ("itl", 30), ("e2e", 230)):
        assert summary.latencies[name].mean == pytest.approx(milliseconds)
        assert summary.latencies[name].max == pytest.approx(milliseconds)
    assert summary.latencies["itl"].count == 6 * 5
    assert summary.duration == pytest.approx(6 * 0.23)
    assert (summary.num_output_tokens, summary.num_prompt_tokens, summary.num_cached_tokens) == (36, 60, 6)
    assert summary.is_counted_by_server
    assert summary.goodput is not None
    assert summary.goodput.share == 1.0


def test_what_is_sent_is_what_was_asked_for():
    with scripted() as server:
        _measure(server, api_key="secret", temperature=0.5, extra_body='{"top_k": 3}', prefix_len=4)
        headers, _, _ = server.requests[-1]
        bodies = _sent(server)
    assert headers["authorization"] == "Bearer secret"
    assert len(bodies) == 8
    assert all(len(body["prompt"]) == 10 and max(body["prompt"]) < 100 for body in bodies)
    assert len({tuple(body["prompt"][:4]) for body in bodies}) == 1
    one = bodies[0]
    assert one["stream"] is True
    assert one["stream_options"] == {"include_usage": True}
    assert (one["model"], one["max_tokens"], one["temperature"], one["top_k"]) == ("scripted", 5, 0.5, 3)
    assert (one["ignore_eos"], one["min_tokens"]) == (True, 5)


def test_equal_seeds_send_equal_bodies():
    def bodies(seed):
        with scripted() as server:
            _measure(server, seed=seed, num_requests=4, range_ratio=0.5, max_concurrency=1)
            return _sent(server)

    assert bodies(1) == bodies(1)
    assert bodies(1) != bodies(2)


def test_chat_sends_text_and_hears_deltas(tmp_path):
    folder = byte_level(tmp_path / "tokenizer")
    with scripted(lambda path, body: Reply(num_tokens=4, ttft=0.05)) as server:
        measured = _measure(server, endpoint="chat", vocab_size=None, tokenizer=str(folder), num_requests=2)
        bodies = _sent(server)
        assert {path for _, path, _ in server.requests} == {"/v1/models", "/v1/chat/completions"}
    assert measured.summary.num_completed == 2
    assert measured.summary.latencies["ttft"].p50 >= 50  # the delta with the role is not a token
    assert all(isinstance(body["messages"][0]["content"], str) for body in bodies)


def test_extensions_are_left_out_where_the_server_refuses_them():
    def reply(path, body):
        return (
            Reply(status=400, body='{"error": {"message": "what is ignore_eos?"}}') if "ignore_eos" in body else Reply()
        )

    with scripted(reply) as server:
        measured = _measure(server)
        assert not measured.exact_length
        assert measured.summary.num_completed == 8
        assert all("min_tokens" not in body for body in _sent(server)[1:])
    with scripted(reply) as server, pytest.raises(InvalidRequest, match="what is ignore_eos"):
        _measure(server, ignore_eos=True)


def test_every_kind_of_failure_is_counted_and_reported():
    broken = [
        Reply(status=429, body='{"error": {"message": "slow down"}}'),
        Reply(status=500, body="<html>oops</html>"),
        Reply(num_tokens=4, cut_after=2),
        Reply(num_tokens=4, error_after=2),
    ]
    number = iter(range(1000))

    def reply(path, body):
        index = next(number)  # 0 is the warm-up
        return broken[index - 1] if 1 <= index <= len(broken) else Reply()

    with scripted(reply) as server:
        summary = _measure(server, num_requests=6, max_concurrency=1).summary
    assert (summary.num_completed, summary.num_failed) == (2, 4)
    failures = {failure.kind: failure.example for failure in summary.failures}
    assert failures["HTTP 429"] == "slow down"
    assert failures["HTTP 500"] == "<html>oops</html>"
    assert failures["error in stream"] == "the device is gone"
    assert failures.keys() & {"connection", "cut off"}
    assert sum(failure.count for failure in summary.failures) == 4


def test_an_answer_that_takes_too_long_is_a_failure():
    async def send(url):
        async with client.Client(ServingOptions(url=url, timeout=0.1)) as sender:
            await sender.send(b"{}", outcome)

    outcome = client.Outcome(index=0, due=0.0, sent=0.0)
    with scripted(lambda path, body: Reply(hangs=True)) as server:
        asyncio.run(send(server.url))
    assert (outcome.kind, outcome.error) == ("timeout", "no whole answer within the timeout")


def test_a_server_that_is_not_there_is_an_error_at_once():
    nowhere = "localhost:9"
    with pytest.raises(InvalidRequest, match=nowhere) as refusal:
        asyncio.run(measure(ServingOptions(url=f"http://{nowhere}", progress=False), slos={}))
    assert refusal.value.param == "url"


def test_a_first_request_that_fails_ends_the_run():
    refusal = Reply(status=401, body='{"error": {"message": "no key"}}')
    with scripted(lambda path, body: refusal) as server, pytest.raises(InvalidRequest, match="HTTP 401: no key"):
        _measure(server)


def test_a_model_that_is_not_served_is_named():
    with scripted() as server, pytest.raises(InvalidRequest, match="scripted") as refusal:
        _measure(server, model="other")
    assert refusal.value.param == "model"


def test_a_server_without_a_list_of_models_needs_its_name():
    with scripted() as server:
        server.models = None
        assert _measure(server, model="unlisted").summary.num_completed == 8
        assert {body["model"] for body in _sent(server)} == {"unlisted"}
        with pytest.raises(InvalidRequest, match="no models"):
            _measure(server)


def test_no_more_run_at_once_than_may():
    with scripted() as server:
        is_first = iter([True])  # the warm-up
        server.reply = lambda path, body: (
            Reply() if next(is_first, False) else Reply(ttft=0.02, may_begin=lambda: server.max_open >= 3)
        )
        summary = _measure(server, num_requests=20, max_concurrency=3).summary
        assert server.max_open == 3
    assert summary.peak_concurrency == 3
    assert summary.num_completed == 20


def test_without_a_limit_all_run_at_once():
    with scripted() as server:
        server.reply = lambda path, body: Reply(may_begin=lambda: server.max_open == 40)
        summary = _measure(server, num_requests=40, num_warmups=0, ignore_eos=False).summary
    assert summary.peak_concurrency == summary.num_completed == 40


def test_requests_leave_at_their_time():
    with scripted() as server:
        measured = _measure(server, num_requests=30, request_rate=100.0)
    sent = [outcome.sent - measured.result.start for outcome in measured.result.outcomes]
    due = [outcome.due - measured.result.start for outcome in measured.result.outcomes]
    assert all(actual >= wanted for actual, wanted in zip(sent, due, strict=True))
    assert due[-1] == pytest.approx(0.3, rel=0.7)
    delay = measured.summary.send_delay
    assert delay is not None
    late = [(actual - wanted) * 1e3 for actual, wanted in zip(sent, due, strict=True)]
    assert (delay.p50, delay.max) == pytest.approx((statistics.median(late), max(late)))


def test_after_its_duration_nothing_is_sent():
    with scripted(lambda path, body: Reply(ttft=0.05)) as server:
        summary = _measure(server, num_requests=500, request_rate=20.0, duration=0.5).summary
    assert 0 < summary.num_requests < 40
    assert summary.num_unsent == 500 - summary.num_requests
    assert summary.num_failed == 0


def test_lengths_are_cut_to_the_context_of_the_server():
    with scripted(max_model_len=64) as server:
        measured = _measure(server, input_len=100, output_len=20)
        bodies = _sent(server)
    assert measured.summary.num_shortened == 8
    assert {(len(body["prompt"]), body["max_tokens"]) for body in bodies} == {(44, 20)}


def test_without_usage_chunks_are_counted():
    with scripted(lambda path, body: Reply(num_tokens=4, has_usage=False)) as server:
        summary = _measure(server, num_requests=2).summary
    assert not summary.is_counted_by_server
    assert (summary.num_output_tokens, summary.num_prompt_tokens) == (8, 20)


def test_an_answer_without_text_ends_with_its_last_chunk():
    with scripted(lambda path, body: Reply(num_tokens=3, ttft=0.05, has_text=False)) as server:
        summary = _measure(server, num_requests=1).summary
    assert summary.num_completed == 1
    assert summary.latencies["ttft"].p50 >= 50


@pytest.mark.slow
def test_the_command_prints_and_writes_everything(tmp_path, capsys):
    with scripted() as server:
        flags = ["--url", server.url, "--vocab-size", "100", "--num-requests", "5", "--no-progress", "--per-request"]
        flags += ["--save-json", str(tmp_path / "run.json"), "--save-plot", str(tmp_path / "run.png")]
        flags += ["--api-key", "secret", "--goodput", "ttft:5000", "e2e:9000"]
        assert cli.main(["bench", "serve", *flags]) == 0
    text = capsys.readouterr().out
    assert "5 / 5" in text
    assert "ttft <= 5000 ms, e2e <= 9000 ms" in text
    written = (tmp_path / "run.json").read_text()
    assert "secret" not in written
    content = json.loads(written)
    assert content["summary"]["num_completed"] == 5
    assert content["summary"]["goodput"]["share"] == 1.0
    assert content["options"]["num_requests"] == 5
    assert len(content["requests"]) == 5
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_package_that_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jaxserve.bench.serving.run", None)
    assert cli.main(["bench", "serve"]) == 1
    assert "jaxserve[bench]" in capsys.readouterr().err


def test_the_command_fails_if_a_request_does(capsys):
    number = iter(range(100))
    with scripted(lambda path, body: Reply(status=429 if next(number) == 2 else 200)) as server:
        flags = ["--url", server.url, "--vocab-size", "100", "--num-requests", "4", "--no-progress"]
        assert cli.main(["bench", "serve", *flags]) == 1
    assert "HTTP 429" in capsys.readouterr().out


def test_a_plot_into_nowhere_is_refused_before_anything_is_sent(tmp_path, capsys):
    with scripted() as server:
        flags = ["--url", server.url, "--save-plot", str(tmp_path / "missing" / "run.png")]
        assert cli.main(["bench", "serve", *flags]) == 1
        assert server.requests == []
    assert "no folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_signal_ends_the_run_with_a_report():
    with scripted() as server:
        server.reply = lambda path, body: Reply(hangs=len(server.requests) > 2)
        flags = ["--url", server.url, "--vocab-size", "100", "--num-requests", "5000"]
        flags += ["--input-len", "10", "--request-rate", "20"]
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxserve", "bench", "serve", *flags, "--no-progress"],
            stdout=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: len(server.requests) >= 5)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "interrupted" in output
    assert "not sent" in output


def test_a_streamed_chunk_costs_little():
    """Measured 2026-11-20: 30 to 45 us of CPU, against 120 with httpx. The bound leaves room for slow machines."""
    with scripted(lambda path, body: Reply(num_tokens=200, gap=0.002)) as server:
        before = time.thread_time()
        summary = _measure(server, num_requests=20, output_len=200, num_warmups=1).summary
        spent = time.thread_time() - before
    assert summary.latencies["itl"].count == 20 * 199
    assert spent / (21 * 200) < 500e-6


def test_options_are_fields_of_one_dataclass(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "serve", "--help"])
    text = capsys.readouterr().out
    for field in dataclasses.fields(ServingOptions):
        assert f"--{field.name.replace('_', '-')}" in text
