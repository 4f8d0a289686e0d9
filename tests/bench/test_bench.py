import json
import math
import re
import statistics
import threading
import types

import pytest
from tiny_tokenizer import byte_level

from jaxserve.bench import bits_per_byte, full_load, latency, speculation, steps, throughput
from jaxserve.bench.engine_run import kv_use_at_full_load, traced
from jaxserve.bench.report import table
from jaxserve.bench.shapes import LLAMA_100M, eagle3_head, write_config
from jaxserve.bench.workloads import BatchShape, Job, mixed_jobs
from jaxserve.cli import main
from jaxserve.config import EngineConfig
from jaxserve.engine import profile
from jaxserve.engine.client import EngineStats
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.request import EngineOutput

TINY = LLAMA_100M | {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def random_weights(folder, fields=TINY, **options):
    """Return the config of an engine of a tiny model."""
    return EngineConfig(model=str(write_config(folder, fields)), load_format="dummy", warmup="none", **options)


class SlowPrefill:
    """An engine whose second request has its first token late, and the others when a profile has begun."""

    def __init__(self):
        self.events: list[str] = []
        self._is_traced = threading.Event()

    def submit(self, requests, sink):
        def run():
            first, second = (request.request_id for request in requests)
            sink([EngineOutput(request_id=first, new_token_ids=[1])])
            threading.Event().wait(0.1)
            self.events.append("both decode")
            sink([EngineOutput(request_id=second, new_token_ids=[1])])
            assert self._is_traced.wait(60)
            for name in (first, second):
                sink([EngineOutput(request_id=name, new_token_ids=[2], finish_reason="length")])

        threading.Thread(target=run).start()

    def stats(self):
        return EngineStats()

    def is_alive(self):
        return True

    def start_profile(self, directory):
        self.events.append("started")
        self._is_traced.set()

    def stop_profile(self):
        self.events.append("stopped")


@pytest.mark.parametrize("is_decode_only", [True, False])
def test_a_trace_begins_when_it_should(monkeypatch, is_decode_only):
    monkeypatch.setattr(profile, "read_profile", lambda folder: ["work"])
    client, jobs = SlowPrefill(), [Job(prompt_token_ids=[1], output_len=2)] * 2
    assert traced(client, jobs, prefix="a", is_decode_only=is_decode_only) == ["work"]
    begin = ["both decode", "started"] if is_decode_only else ["started", "both decode"]
    assert client.events == [*begin, "stopped"]


def test_a_trace_of_a_window_ends_while_jobs_run(monkeypatch):
    monkeypatch.setattr(profile, "read_profile", lambda folder: ["work"])

    class Untraced(SlowPrefill):
        def submit(self, requests, sink):
            self.end = lambda: sink(
                [EngineOutput(request_id=requests[0].request_id, new_token_ids=[1], finish_reason="length")]
            )

        def stop_profile(self):
            super().stop_profile()
            self.end()

    client = Untraced()
    assert traced(client, [Job(prompt_token_ids=[1], output_len=1)], prefix="a", window=(0.01, 0.02)) == ["work"]
    assert client.events == ["started", "stopped"]


def test_jobs_that_end_at_once_leave_nothing_to_trace():
    class Quick(SlowPrefill):
        def submit(self, requests, sink):
            sink([EngineOutput(request_id=x.request_id, new_token_ids=[1], finish_reason="length") for x in requests])

    client = Quick()
    assert traced(client, [Job(prompt_token_ids=[1], output_len=1)], prefix="a", is_decode_only=True) == []
    assert client.events == []


@pytest.mark.parametrize(
    ("durations", "median"), [([1.5], 1.5), ([0.4, 0.1, 0.3, 0.5], 0.35), ([0.01 * n for n in range(9)], 0.04)]
)
def test_what_is_short_is_timed_again(monkeypatch, durations, median):
    """Until it has taken a second, or nine times."""
    now, left, seeds = [0.0], list(durations), []

    def run(client, jobs, *, prefix):
        seeds.append(jobs[0].prompt_token_ids)
        now[0] += left.pop(0)

    client = types.SimpleNamespace(info=types.SimpleNamespace(vocab_size=1000))
    monkeypatch.setattr(latency, "warm_up", lambda *args, **kwargs: None)
    monkeypatch.setattr(latency, "complete", run)
    monkeypatch.setattr(latency, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    measured = latency._measure(client, BatchShape(1, 8, 1), profile=False)
    assert measured.prefill == pytest.approx(median)
    assert not left
    assert len({tuple(tokens) for tokens in seeds}) == len(durations)  # no prompt twice, whatever is cached


def _jobs(count: int, seed: int = 0) -> list[Job]:
    return mixed_jobs(count, mean_input=100, mean_output=50, seed=seed, vocab_size=77)


def test_mixed_jobs_have_the_asked_means_and_a_tail():
    jobs = _jobs(4000)
    lengths = [len(job.prompt_token_ids) for job in jobs]
    assert 90 < statistics.mean(lengths) < 105
    assert 45 < statistics.mean(job.output_len for job in jobs) < 53
    assert min(lengths) >= 1
    assert 250 < max(lengths) <= 400
    assert {token for job in jobs for token in job.prompt_token_ids} == set(range(77))


def test_a_seed_fixes_the_jobs():
    assert _jobs(20) == _jobs(20)
    assert _jobs(20) != _jobs(20, seed=1)


def test_kv_use_counts_the_snapshots_at_full_load_only():
    def snapshot(running: int, held: int, allocated: int) -> EngineStats:
        return EngineStats(num_running=running, kv_tokens_held=held, kv_positions_allocated=allocated)

    ramp, full, almost, tail = snapshot(2, 1, 100), snapshot(10, 80, 100), snapshot(9, 90, 100), snapshot(8, 1, 100)
    assert kv_use_at_full_load([ramp, full, almost, tail]) == (0.8 + 0.9) / 2
    assert kv_use_at_full_load([]) is None


def test_a_table_is_aligned_markdown():
    assert table(["", "seconds"], [["a", "1.0"], ["longer", "12.5"]]).splitlines() == [
        "|        | seconds |",
        "| ------ | ------: |",
        "| a      |     1.0 |",
        "| longer |    12.5 |",
    ]


def test_the_report_compares_with_the_first_contender():
    contenders = [throughput.Contender("ours", 2.0, 3.5, 0.97), throughput.Contender("theirs", 8.0, 15.0, None)]
    report = throughput.report(contenders, [Job([1, 2, 3], 10), Job([4], 30)])
    assert "2 requests, 4 prompt and 40 output tokens (longest output 30)" in report
    ours, theirs = report.splitlines()[-2:]
    assert [cell.strip() for cell in ours.split("|")[1:-1]] == ["ours", "2.0", "3.5", "20.0", "1.00", "97.0%"]
    assert [cell.strip() for cell in theirs.split("|")[1:-1]] == ["theirs", "8.0", "15.0", "5.0", "0.25", "-"]


@pytest.mark.slow
def test_throughput_runs_both_schedulers():
    jobs = mixed_jobs(5, mean_input=12, mean_output=6, seed=0, vocab_size=128)
    engine = EngineConfig(max_num_seqs=2, max_num_batched_tokens=16, warmup="none")
    report = throughput.run(jobs, model_config=TINY, engine=engine, peer_python=None)
    names = [line.split("|")[1].strip() for line in report.splitlines() if line.startswith("| jaxserve")]
    assert names == ["jaxserve, continuous batching", "jaxserve, static batching"]


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2])
def test_latency_counts_what_it_asked_for(tmp_path, num_devices):
    options = {"tensor_parallel_size": num_devices, "enable_prefix_caching": False}
    config = random_weights(tmp_path, max_model_len=64, max_num_batched_tokens=16, **options)
    peer_file = tmp_path / "peer.json"
    runs = [{"B": 3, "i": 10, "o": 6, "prefill_tok_s": 1234, "out_tok_s": 77, "tpot_ms": 5.5, "total_s": 1.0}]
    peer_file.write_text(json.dumps({"note": "how it was measured", "a model": {"runs": runs}}))
    shapes = [BatchShape.parse("3:10:6"), BatchShape.parse("2:8:1")]
    peer = latency.read_peer(peer_file, None)
    saved = tmp_path / "run.json"
    report = latency.run(config, shapes, peer=peer, bandwidth=1e6, profile=True, save_json=saved)
    first, second = ([cell.strip() for cell in line.split("|")[1:-1]] for line in report.splitlines()[-2:])
    figures = dict(zip(["requests", *latency.HEADER[1:]], first, strict=True))
    assert (first[0], second[0]) == ("3 x 10 in, 6 out", "2 x 8 in, 1 out")
    assert (first[2], first[4], first[7]) == ("1234", "77", "5.50")
    assert float(first[5]) == pytest.approx(float(first[3]) / 77, abs=0.02)
    assert float(first[1]) > 0
    assert float(first[3]) > 0
    num_weights = 128 * 32 + (4 * 16 + 32 + 3 * 32) * 32 + 3 * 32  # the tied embedding, one layer, norms
    kv_elements = 3 * 13 * 2 * 16 * num_devices  # 3 requests, 13 tokens on average, a KV head that each device has
    assert figures["floor"] == f"{(num_weights + kv_elements) * 4 / (1e6 * num_devices) * 1e3:.2f}"
    assert second[5:] == ["-"] * 6
    run = latency.read_run(saved)
    assert run.engine == config
    assert run.weight_bytes == num_weights * 4
    assert [(batch.num_requests, batch.input_len, batch.output_len) for batch in run.batches] == [(3, 10, 6), (2, 8, 1)]
    assert f"{run.batches[0].per_token * 1e3:.2f}" == figures["ms a token"]
    assert run.batches[1].per_token is None


@pytest.mark.slow
def test_steps_of_a_batch(tmp_path):
    """Steps of 16 tokens take a prompt of 10 and part of the next one, then the rest of that and another one."""
    options = {"max_num_seqs": 4, "enable_prefix_caching": False}
    config = random_weights(tmp_path, max_model_len=64, max_num_batched_tokens=16, **options)
    reports = list(steps.run(config, [BatchShape(3, 10, 5), BatchShape(1, 40, 2)], profile=True))
    assert len(reports) == 4
    report = "\n\n".join(reports)
    assert [line.split(":")[0] for line in report.splitlines() if line[:1].isdigit()] == [
        "3 x 10 in, 5 out",
        "1 x 40 in, 2 out",
    ]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in report.splitlines() if line[2:3].isdigit()]
    assert rows == [
        ["1", "1", "1"],
        ["3", "2", "1"],
        ["3", "0", "3"],
        ["2", "0", "1"],
        ["1", "1", "1"],
        ["1", "0", "1"],
    ]
    assert report.count("no GPU was seen at work") == 2


def test_batches_that_are_none():
    for text in ("", "1:2", "1:2:3:4", "a:1:1", "0:1:1", "1:-1:1"):
        with pytest.raises(ConfigError, match="B:IN:OUT"):
            BatchShape.parse(text)


@pytest.mark.parametrize("entry", ["x", None])
@pytest.mark.parametrize("text", ["", "[]", '"x"', "{}", '{"x": 1}', '{"x": []}', '{"x": {"runs": [{"B": 1}]}}'])
def test_peers_that_are_none(tmp_path, text, entry):
    path = tmp_path / "peer.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no runs of"):
        latency.read_peer(path, entry)
    with pytest.raises(ConfigError, match="no table "):
        full_load.read_peer(path, entry)


@pytest.mark.parametrize("rows", [[[1]], [["a", 2, 3]], [[1, 2, "fast"]], [1], [[1, 2, None]]])
def test_tables_that_are_none(tmp_path, rows):
    path = tmp_path / "peer.json"
    path.write_text(json.dumps({"title": "of a peer", "x": rows}))
    with pytest.raises(ConfigError, match="no table in"):
        full_load.read_peer(path, None)


@pytest.mark.slow
def test_settings_longer_than_the_model_are_refused_before_any_runs(tmp_path, capsys):
    config = random_weights(tmp_path, max_model_len=16, max_num_seqs=2)
    settings = [BatchShape(1, 2, 2), BatchShape(1, 14, 3)]
    with pytest.raises(InvalidRequest, match="max_model_len is 16: no room for 1 x 14 in, 3 out"):
        full_load.run(config, settings, peer={}, bandwidth=None)
    assert "2 in" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.txt", "short", "too short for 6 prompts"),
        ("a.jsonl", "", "too short for 6 prompts"),
        ("a.jsonl", "{", "cannot read"),
        ("a.jsonl", "[1]", "Expected `object`"),
        ("a.jsonl", '{"turns": "text"}', "Expected `array`"),
        ("a.jsonl", '{"turns": [5]}', "Expected `str`"),
        ("a.jsonl", '{"turns": []}', "cannot read"),
        ("a.jsonl", '{"turns": ["a"], "category": "x"}', "no prompts of 'y'; there is x"),
    ],
)
def test_workloads_without_prompts(tmp_path, name, text, complaint):
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidRequest, match=complaint):
        speculation._texts(tmp_path / name, "y" if "category" in text else None, 6)


def test_workloads_need_no_categories(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"turns": ["a", "b"]}\n\n{"turns": ["c"], "category": "x"}')
    assert speculation._texts(tmp_path / "a.jsonl", None, 6) == ["a", "c"]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("full-load --settings 8:1:1 --bandwidth 0", "--bandwidth: must be a positive number, got 0"),
        ("latency --beside int8 --profile --save-json x", "--profile, --save-json: not with --beside"),
        ("latency --save-json no/such/x", "--save-json: there is no folder for no/such/x"),
        ("latency --peer-entry x", "--peer-entry: of which --peer?"),
        ("latency --shape llama-100m --model x", "--model and --shape exclude each other"),
        ("throughput --peer-python no/such", "--peer-python: no/such is no interpreter"),
        ("grammar --num-steps 1", "--num-steps: must be at least 2, got 1"),
        ("kv-rounding", "--text and --shapes: one of them must be given"),
        ("kv-rounding --text x --shapes window", "--text and --shapes: one of them must be given"),
        ("latency --bandwidth nan", "--bandwidth: must be a positive number, got nan"),
        ("speculation --workload x --at-once 1 0", "--at-once: must be at least 1, got 0"),
        ("speculation --workload x --beside [1]", "--beside: '[1]' is not a JSON object"),
        ("speculation --synthetic-acceptance 2 --category x --temperature 1", "--category, --temperature: only for a"),
    ],
)
def test_flags_that_are_refused(capsys, flags, complaint):
    with pytest.raises(SystemExit):
        main(["bench", *flags.split()])
    assert complaint in capsys.readouterr().err


@pytest.mark.slow
def test_bits_per_byte_of_a_model_that_knows_nothing(tmp_path):
    """Small random weights make every token nearly as likely as any: log2(vocabulary) bits, but for the first."""
    folder = byte_level(tmp_path / "model")
    vocab_size = 300
    text_path = tmp_path / "text.txt"
    text_path.write_text("xyz" * 100)  # a token a byte
    config = random_weights(folder, TINY | {"vocab_size": vocab_size}, max_model_len=101, max_num_batched_tokens=64)
    title, *_, ours, xz = bits_per_byte.run(config, text_path=text_path).splitlines()
    assert title == "text.txt: 300 bytes, 300 tokens in 3 runs; no BOS, so 3 tokens cost nothing"
    bits = float(ours.split("|")[2])
    assert bits == pytest.approx(math.log2(vocab_size) * 297 / 300, rel=0.01)
    assert 0 < float(xz.split("|")[2]) < bits


@pytest.mark.slow
def test_bits_per_byte_beside_rounded_matrices(tmp_path):
    text_path = tmp_path / "text.txt"
    text_path.write_text("Once upon a time there was a king. " * 10)
    config = EngineConfig(model="scribe-2m", max_model_len=51, max_num_batched_tokens=64, warmup="none")
    report = bits_per_byte.run(config, text_path=text_path, quantizations=("int8",), kv_cache_dtypes=("int8",))
    ours = [line for line in report.splitlines() if "in int8" in line]
    assert len(ours) == 2
    for line in ours:
        assert re.fullmatch(r"[+-]\d\.\d{4} \+- \d\.\d{4}", line.split("|")[3].strip())


def test_bits_per_byte_of_random_weights_has_nothing_beside_it(tmp_path):
    (tmp_path / "text.txt").write_text("xyz")
    with pytest.raises(InvalidRequest, match="random weights") as refusal:
        bits_per_byte.run(EngineConfig(load_format="dummy"), text_path=tmp_path / "text.txt", quantizations=("int8",))
    assert refusal.value.param == "beside"


def test_bits_per_byte_names_a_text_that_is_not_there(tmp_path):
    with pytest.raises(InvalidRequest, match=r"missing\.txt") as refusal:
        bits_per_byte.run(EngineConfig(), text_path=tmp_path / "missing.txt")
    assert refusal.value.param == "text"


@pytest.mark.slow
def test_kv_rounding_of_a_text_and_of_a_small_shape(tmp_path, capsys):
    text_path = tmp_path / "text.txt"
    text_path.write_text("Once upon a time there was a king. " * 10)
    for flags in (
        ["--model", "scribe-2m", "--text", str(text_path), "--num-tokens", "40"],
        ["--shapes", "window", "--num-tokens", "50"],
    ):
        main(["bench", "kv-rounding", *flags, "--outliers", "8"])
        rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
        assert [name.strip() for name in rows[0][1:]] == ["K", "V", "both", "K, outliers x 8"]
        names = ["fp8_e4m3", "fp8_e5m2", "int8"]
        assert [row[0].strip() for row in rows[2:]] == [n for name in names for n in (name, f"{name}, static")]
        for row in rows[2:]:
            for cell in row[1:]:
                mean, largest = map(float, cell.split("/"))
                assert 0 < mean < largest


@pytest.mark.parametrize("rates", [[2.0, 1.0, 4.0], [3.0]])
def test_pairs_of_runs(rates):
    """The middle ratio counts, not that of the middle rates."""

    def run(rate, accepted):
        return speculation._Run({"a": [1, 2], "b": [3]}, 3 / rate, 2, 0.004, 1, 4, accepted)

    pairs = speculation._Pairs([run(1.0, ())] * len(rates), [run(rate, (1, 1, 0, 0)) for rate in rates])
    row = dict(zip(speculation.HEADER, pairs.row("2", "3"), strict=True))
    assert row["faster"] == f"{statistics.median(rates):.3f}"
    assert (row["from"], row["to"]) == (f"{min(rates):.3f}", f"{max(rates):.3f}")
    assert row["drafts accepted"] == "2 of 4"
    assert "3.00 tokens a step that had drafts; accepted by position: 1.00, 1.00, 0.00, 0.00; 2 of 2" in pairs.summary()


def test_speculation_with_a_head_of_random_weights(tmp_path):
    shape = TINY | {"num_hidden_layers": 3}
    head = write_config(tmp_path / "head", eagle3_head(shape))
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 2, "kv_cache_memory": 2**24, "max_model_len": 64}
    config = random_weights(tmp_path, shape, speculative_config=drafts, **sizes, kernels="xla")
    report = speculation.by_chance(config, input_len=1, output_len=7, at_once=[1], lengths=[1, 3], num_pairs=1)
    _, _, header, _, *rows = report.splitlines()
    of_three, of_one = (
        dict(zip((cell.strip() for cell in header.split("|")), row.split("|"), strict=True)) for row in rows
    )
    assert float(of_three["tokens a step"]) == 3
    assert of_one["drafts accepted"].split()[0] == "0"
    assert int(of_three["steps, off"]) == int(of_one["steps, off"]) >= 7
