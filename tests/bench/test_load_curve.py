"""`jaxserve bench load-curve` against a scripted server, and the capacity of outcomes that are written down."""

import contextlib
import json
import signal
import threading

import pytest
import tokenizers
from scripted_server import Reply, scripted

from jaxserve import cli
from jaxserve.bench.served import write_tokenizer
from jaxserve.bench.serving.client import Outcome
from jaxserve.bench.serving.curve import capacity_of
from jaxserve.bench.serving.load import LoadResult
from jaxserve.bench.shapes import LLAMA_100M, SHAPES
from jaxserve.errors import InvalidRequest

TINY = LLAMA_100M | {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def _outcome(*chunk_times, kind=None):
    return Outcome(
        index=0, due=0, sent=0, chunk_times=list(chunk_times), num_output_tokens=2 * len(chunk_times), kind=kind
    )


@pytest.mark.parametrize("start", [0.0, 100.0])
def test_capacity_is_that_of_the_last_two_thirds(start):
    """Eight of the 12 tokens of whole requests are in the 6 s from 3 to 9."""
    whole = [_outcome(start + 1, start + 3), _outcome(start + 4, start + 5, start + 8, start + 9)]
    result = LoadResult([*whole, _outcome(start + 5, kind="HTTP 500")], start, 1, 0.0)
    capacity = capacity_of(result, 9.0)
    assert capacity.tokens == pytest.approx(8 / 6)
    assert capacity.requests == pytest.approx(8 / 6 / 6)


def test_capacity_of_too_few_requests_is_that_while_they_were_sent():
    """The last of three was sent after 6 s of 100: four of the tokens are in the 4 s from 2 to 6."""
    outcomes = [_outcome(1, 3), _outcome(4, 8)]
    outcomes[1].sent, last = 3, _outcome(6, 9)
    last.sent = 6
    capacity = capacity_of(LoadResult([*outcomes, last], 0.0, 0, 0.0), 100.0)
    assert capacity.tokens == pytest.approx(4 / 4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_runs(capsys, number):
    is_first = threading.Lock()  # one signal: uvloop may break off with an error when another comes while it ends

    def reply(path, body):
        if path == "/v1/completions" and len(server.requests) > 8 and is_first.acquire(blocking=False):
            signal.raise_signal(number)
        return Reply(num_tokens=body["max_tokens"], ttft=0.04, gap=0.01)

    with scripted(reply) as server:
        command = ["bench", "load-curve", "--url", server.url, "--vocab-size", "100", "--no-progress"]
        assert cli.main([*command, "--input-len", "8", "--output-len", "5", "--seconds", "5", "--at-once", "4"]) != 0
    assert len(server.requests) < 40
    assert "capacity" not in capsys.readouterr().err


def test_capacity_of_requests_that_all_fail():
    with pytest.raises(InvalidRequest, match="HTTP 500: broken"):
        capacity_of(LoadResult([Outcome(index=0, due=0, sent=0, kind="HTTP 500", error="broken")], 0.0, 0, 0.0), 1.0)


def test_curve(tmp_path, capsys):
    """A server of constant times: nothing waits, whatever the load; the trace brings its own lengths."""
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:17:{second:02d}.0000000,{10 + second},3" for second in range(60)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    saved, picture = tmp_path / "curve.json", tmp_path / "curve.svg"

    def reply(path, body):
        return Reply(num_tokens=body["max_tokens"], ttft=0.04, gap=0.01)

    with scripted(reply) as server:
        command = ["bench", "load-curve", "--url", server.url, "--vocab-size", "100", "--no-progress"]
        command += [
            "--input-len",
            "8",
            "--output-len",
            "5",
            "--seconds",
            "0.6",
            "--at-once",
            "4",
            "--loads",
            "0.5",
            "1",
        ]
        command += ["--levels", "ttft:1", "ttft:30000,itl:30000", "--trace", str(trace)]
        assert cli.main([*command, "--save-json", str(saved), "--save-plot", str(picture)]) == 0
    curve = json.loads(saved.read_text())
    assert [(point["arrivals"], point["load"]) for point in curve["points"]] == [
        (kind, load) for kind in ("poisson", "bursts", "azure") for load in (0.5, 1)
    ]
    prompts = [str(body["prompt"]) for _, path, body in server.requests if path != "/v1/models"]
    assert len(set(prompts)) > 0.9 * len(prompts)  # but for warm-ups
    for point in curve["points"]:
        workload = "azure" if point["arrivals"] == "azure" else "random"
        length = 3 if workload == "azure" else 5
        summary, capacity = point["summary"], curve["capacities"][workload]
        assert point["rate"] == pytest.approx(point["load"] * capacity["requests"])
        assert capacity["tokens"] == pytest.approx(length * capacity["requests"])
        assert summary["num_completed"] == summary["num_requests"] == -(-point["rate"] * 0.6 // 1)
        assert summary["num_output_tokens"] == length * summary["num_requests"]
        assert [one["share"] for one in point["goodputs"]] == [0.0, 1.0]
    printed = capsys.readouterr().out
    assert "B: ttft <= 30000 ms, itl <= 30000 ms" in printed
    drawn = picture.read_text()
    assert drawn.startswith("<?xml")
    assert all(name in drawn for name in ("poisson", "bursts", "azure", "ttft 1 ms"))
    picture.unlink()
    assert cli.main(["bench", "load-curve", "--draw", str(saved), "--save-plot", str(picture)]) == 0
    assert picture.read_text() == drawn
    assert capsys.readouterr().out in printed


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--url", "http://127.0.0.1:1", "--shape", "llama-100m"], "exclude each other"),
        (["--serve", "scribe-2m", "--port=80"], "--port: --serve listens on a port of its own"),
        (["--shape", "llama-100m", "--serve", "--ssl-certfile", "c.pem"], "--ssl-certfile: --serve listens"),
        (["--levels", "ttft"], "NAME:MILLISECONDS"),
        (["--loads", "0"], "positive"),
        (["--draw", "nowhere.json"], "no load curve in nowhere.json"),
        (["--trace", "nowhere.csv", "--url", "http://127.0.0.1:1"], "cannot read nowhere.csv"),
    ],
)
def test_flags_that_cannot_be_followed(flags, said, capsys):
    with contextlib.suppress(SystemExit):
        assert cli.main(["bench", "load-curve", *flags])
    assert said in capsys.readouterr().err


def test_a_server_that_does_not_start_says_why(capsys, tmp_path):
    assert cli.main(["bench", "load-curve", "--serve", str(tmp_path / "no model")]) == 1
    error = capsys.readouterr().err
    assert "the server has ended" in error
    assert "no model" in error


@pytest.mark.slow
def test_a_server_of_random_weights_is_started_for_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(SHAPES, "llama-100m", TINY)
    saved = tmp_path / "curve.json"
    command = ["bench", "load-curve", "--shape", "llama-100m", "--seconds", "4", "--at-once", "2", "--loads", "0.5"]
    command += ["--input-len", "8", "--output-len", "5", "--no-progress", "--save-json", str(saved)]
    assert cli.main([*command, "--serve", "--max-num-seqs", "2", "--warmup", "full", "--max-model-len", "64"]) == 0
    for point in json.loads(saved.read_text())["points"]:
        assert point["summary"]["num_completed"] == point["summary"]["num_requests"] > 0
        assert point["summary"]["num_output_tokens"] == 5 * point["summary"]["num_requests"]


def test_tokens_of_random_weights_have_texts_of_their_own(tmp_path):
    """Clients see each of them. The first 256 are bytes."""
    write_tokenizer(tmp_path, 400)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = [tokenizer.decode([token]) for token in range(400)]
    assert all(texts)
    assert len(set(texts[256:])) == 144
