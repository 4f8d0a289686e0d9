"""Servers on a virtual clock: measured batches take their time, and budgets keep what they promise."""

import pytest

from jaxserve.bench.serving.workloads import Call
from jaxserve.bench.shapes import SHAPES, write_config
from jaxserve.config import EngineConfig
from jaxserve.gpus import GPUS
from jaxserve.planning import budgets
from jaxserve.planning.measured import MEASURED
from jaxserve.planning.simulation import NOTHING, Decoding, StepTimes, adaptive, fixed, limits_of, simulate
from jaxserve.planning.sizes import declare

SMALL = ("--shape", "llama-100m", "--device", "h200", "--dtype", "bfloat16")


def absent_engine(shape, folder, **options):
    config = EngineConfig(model=str(write_config(folder, SHAPES[shape])), **options)
    return declare(config, GPUS["h200"], to_compile=False)


def calls_of(number, input_len, output_len):
    return [Call(prompt=(), num_prompt_tokens=input_len, output_len=output_len)] * number


@pytest.mark.parametrize(
    ("shape", "options", "num_rows"), [("llama-3-8b", {"quantization": "fp8"}, 64), ("qwen3-30b-a3b-fp8", {}, 16)]
)
def test_measured_batches_take_as_long(tmp_path, shape, options, num_rows):
    batches = next(each for each in MEASURED if (each.shape, each.weights, each.num_devices) == (shape, "fp8", 1))
    run = next(run for run in batches.runs if run.num_rows == num_rows)
    engine = absent_engine(shape, tmp_path, **options)
    calls = calls_of(num_rows, run.input_len, run.output_len)
    limits = limits_of(engine)
    outcomes = simulate(StepTimes(engine), limits, calls, [0.0] * num_rows, fixed(8192)).outcomes
    prefill = max(outcome.chunk_times[0] for outcome in outcomes)
    step = (max(outcome.ended for outcome in outcomes) - prefill) / (run.output_len - 1)
    assert prefill * 1e3 == pytest.approx(run.prefill, rel=0.1)
    assert step * 1e3 == pytest.approx(run.step, rel=0.05)


def test_a_budget_by_time_is_the_largest_that_meets_its_target(tmp_path):
    times = StepTimes(absent_engine("llama-3-8b", tmp_path))
    decoding = Decoding(64, 64 * 1024)
    budget = adaptive(times, 8192, target=0.05, patience=0.1)
    chosen = budget(decoding, 0.0)
    assert times.mixed(chosen, decoding, num_rows=65) <= 0.05 < times.mixed(chosen + 1, decoding, num_rows=65)
    assert times.size(chosen) == chosen < budget(NOTHING, 0.0) == budget(decoding, 0.2) == 8192


@pytest.mark.parametrize("design", ["fixed", "adaptive"])
def test_every_request_is_answered_whole(tmp_path, design):
    engine = absent_engine(
        "llama-100m", tmp_path, dtype="bfloat16", max_num_seqs=4, max_num_batched_tokens=256, max_model_len=1024
    )
    times, limits = StepTimes(engine), limits_of(engine)
    designs = {"fixed": fixed(256), "adaptive": adaptive(times, 256, target=1e-4, patience=0.01)}
    calls = calls_of(10, 600, 20)
    arrivals = [0.001 * index for index in range(10)]
    outcomes = simulate(times, limits, calls, arrivals, designs[design]).outcomes
    for outcome, arrival in zip(outcomes, arrivals, strict=True):
        assert len(outcome.chunk_times) == outcome.num_output_tokens == 20
        assert arrival < outcome.chunk_times[0]
        assert outcome.chunk_times == sorted(set(outcome.chunk_times))
        assert outcome.ended == outcome.chunk_times[-1]


def test_the_table_has_a_row_for_each_budget(capsys, monkeypatch):
    monkeypatch.setattr(budgets, "NUM_FULL", 40)
    load = ["--loads", "0.01", "--seconds", "1", "--input-len", "64", "--output-len", "8"]
    budgets.main([*SMALL, "--budgets", "64", "512", "--targets", "5", *load])
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines if line.startswith("| poisson")]
    assert rows == [["poisson", "0.01", design] for design in ("64", "512", "5 ms", "5 ms, waits 100")]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-tp", "2"], "steps are simulated on one device"),
        (["--budgets", "0"], "--budgets: must be at least 1, got 0"),
    ],
)
def test_what_is_not_simulated_is_refused(capsys, flags, said):
    with pytest.raises(SystemExit):
        budgets.main([*SMALL, *flags])
    assert said in capsys.readouterr().err
