"""Plans of GPUs that are not there: sizes as an engine counts them, times as they were measured."""

import os
import subprocess
import sys

import msgspec
import pytest

from jaxserve import cli
from jaxserve.bench.latency import LatencyRun, TimedBatch
from jaxserve.bench.shapes import SHAPES, write_config
from jaxserve.config import EngineConfig
from jaxserve.engine.device import choose_kernels
from jaxserve.errors import ConfigError, OutOfMemory
from jaxserve.execution.programs.kinds import PlainDecode
from jaxserve.execution.programs.shipped import MANIFEST
from jaxserve.gpus import GPUS, find_gpu
from jaxserve.inspect.bubble import simulate
from jaxserve.planning import absent, held_out, times
from jaxserve.planning.ahead import compile_ahead, may_be_shipped
from jaxserve.planning.measured import MEASURED, Batches
from jaxserve.planning.plan import Load, SizedLoad, choose, make_plan, requests_at_once, speed_of
from jaxserve.planning.sizes import declare, sizes_of
from jaxserve.planning.times import estimate_prefill, estimate_step, kind_of
from jaxserve.planning.work import prefill_work

LLAMA_8B_BYTES = 16_060_522_496
LOAD = SizedLoad(input_len=1024, output_len=256)
NO_COMPILER = pytest.mark.skipif(not absent.can_compile(), reason="needs `make deviceless`")


def str_of(value):
    return f"{value.shape}-{value.weights}" if isinstance(value, Batches) else f"{value.num_rows}x{value.input_len}"


RUNS = [(batches, run) for batches in MEASURED for run in batches.runs if batches.num_stages == 1]


def config_of(shape, folder, **options):
    return EngineConfig(model=str(write_config(folder, SHAPES[shape])), **options)


def absent_engine(shape, folder, device="h200", **options):
    return declare(config_of(shape, folder, **options), GPUS[device], to_compile=False)


# What engines of an H100 reported that were started on one, of all options by default.
def test_sizes_are_those_of_a_real_start(tmp_path):
    engine = absent_engine("llama-3-8b", tmp_path, "h100")
    sizes = sizes_of(engine)
    assert (sizes.usable_bytes, sizes.weight_bytes) == (76_516_687_872, LLAMA_8B_BYTES)
    assert (sizes.num_blocks, sizes.kv_bytes) == (27_744, 58_183_385_088)
    in_use = sizes.weight_bytes + sizes.kv_bytes + sizes.slot_bytes
    assert in_use == pytest.approx(74_393_579_008, rel=1e-5)


@pytest.mark.parametrize("device", ["h200", "a100", "t4"])
def test_an_absent_engine_chooses_as_one_on_the_device_does(tmp_path, device):
    engine = absent_engine("llama-100m", tmp_path, device, dtype="float16")
    assert engine.plan.builder.model.kernels == ("sm90" if device == "h200" else "xla")
    assert engine.plan.builder.model.kernels == choose_kernels(
        "auto", engine.plan.devices.first, engine.plan.builder.model.dtype
    )
    assert engine.plan.devices.description == GPUS[device].kind


NOTHING = TimedBatch(num_requests=0, input_len=8, output_len=8, prefill=1.0, per_token=None)


def measured_8b(path, **changes):
    """Write what `bench latency` saves of the 8B shape on that H100; return the path."""
    fields = {
        "shape": "llama-3-8b",
        "engine": EngineConfig(model="a folder that is gone"),
        "device": "NVIDIA H100 80GB HBM3",
        "num_blocks": 27_744,
        "kv_cache_bytes": 58_183_385_088,
        "weight_bytes": LLAMA_8B_BYTES,
        "bytes_in_use": 74_393_579_008,
        "batches": [TimedBatch(num_requests=64, input_len=1024, output_len=32, prefill=1.437, per_token=0.01826)],
    }
    path.write_bytes(msgspec.json.encode(LatencyRun(**fields | changes)))
    return str(path)


def test_a_plan_beside_a_measurement(tmp_path, capsys):
    """Sizes agree with what the engine reported; a step of twice the time that is planned is an error of a half."""
    saved = measured_8b(tmp_path / "run.json")
    assert cli.main(["plan", "--device", "h100", "--compile", "none", "--measured", saved, saved]) == 0
    title, _, *rows = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert title.startswith("llama-3-8b, bfloat16 on NVIDIA H100")
    found = {row.split("  ")[0]: row.split() for row in rows}
    assert found["KV blocks"][-3:] == ["27,744", "27,744", "+0.00%"]
    assert found["weights, bytes"][-1] == found["KV cache, bytes"][-1] == "+0.00%"
    assert abs(float(found["in use on a device, bytes"][-1].rstrip("%"))) < 0.01
    *_, measured, error, stated = found["64 x 1024, 32: a token, ms"]
    assert (measured, stated) == ("18.26", "+-4%")
    assert float(error.rstrip("%")) == pytest.approx(-50, abs=2)


@pytest.mark.parametrize(
    ("flags", "changes", "said"),
    [
        (["--device", "h200"], {}, "measured on NVIDIA H100 80GB HBM3, not on NVIDIA H200"),
        (["--device", "h100", "-tp", "2"], {}, "leave both out"),
        (["--device", "h100", "--json"], {}, "--json: not with --measured"),
        (["--device", "h100"], {"num_blocks": "many"}, "no run of `jaxserve bench latency` in"),
        (["--device", "h100"], {"shape": "round"}, "shape 'round' is not one of"),
        (["--device", "h100"], {"batches": [NOTHING]}, "`int` >= 1 - at `$.batches[0].num_requests`"),
    ],
)
def test_measurements_that_cannot_be_compared(tmp_path, capsys, flags, changes, said):
    saved = measured_8b(tmp_path / "run.json", **changes)
    assert cli.main(["plan", *flags, "--compile", "none", "--measured", saved]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "factor"),
    [({"quantization": "int8"}, 0.55), ({"tensor_parallel_size": 2}, 0.5), ({"dtype": "float32"}, 2)],
)
def test_weights_follow_the_options(tmp_path, options, factor):
    kernels = {"kernels": "xla"} if options.get("dtype") == "float32" else {}
    engine = absent_engine("llama-3-8b", tmp_path, **options, **kernels)
    assert sizes_of(engine).weight_bytes == pytest.approx(factor * LLAMA_8B_BYTES, rel=0.06)


@pytest.mark.parametrize("name", ["h200", "H200", "NVIDIA H200", "nvidia-h200", "NVIDIA GeForce RTX 4090", "Tesla T4"])
def test_devices_have_names(name):
    assert find_gpu(name).kind.lower().endswith(name.lower().removeprefix("nvidia").strip(" -"))


@pytest.mark.parametrize("name", ["", "h300", "cpu"])
def test_an_unknown_device_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"device '{name}' is not known; known are h200, h100, a100"):
        find_gpu(name)


def test_requests_that_fit(tmp_path):
    engine = absent_engine("llama-3-8b", tmp_path, max_num_seqs=64)
    blocks_of_one = (1024 + 256) // 16
    assert requests_at_once(engine, LOAD, 10 * blocks_of_one) == 10
    assert requests_at_once(engine, LOAD, 10 * blocks_of_one - 1) == 9
    assert requests_at_once(engine, LOAD, 10**6) == 64
    assert requests_at_once(engine, SizedLoad(input_len=8192, output_len=1), 10**6) == 0


# Speeds: README's rows within 10%, and with the error that is stated.
@pytest.mark.parametrize(("batches", "run"), RUNS, ids=str_of)
def test_measured_steps_are_predicted(batches, run):
    found = estimate_step(kind_of(batches), run.work / 1e3, num_rows=run.num_rows)
    assert found.seconds * 1e3 == pytest.approx(run.step, rel=0.1 if batches.kernels == "sm90" else 0.15)
    if run.prefill is not None:
        prefill = estimate_prefill(kind_of(batches), run.prefill_work / 1e3, num_tokens=run.num_rows * run.input_len)
        assert prefill.seconds * 1e3 == pytest.approx(run.prefill, rel=2 * prefill.error)


def test_errors_are_those_of_predictions_without_the_run_itself():
    assert 0.04 < times.error_among_runs() < times.error_among_models() < 0.25
    assert times.error_among_models() < times.error_among_models(has_states=True) < 0.25


def test_layers_of_another_size_are_predicted_with_a_large_error():
    batches, run = RUNS[0]
    kind, work = kind_of(batches), run.work / 1e3
    assert estimate_step(kind, work, num_rows=run.num_rows).error < times.WITHOUT_KERNELS
    assert estimate_step(kind, work / 100, num_rows=run.num_rows).error == times.WITHOUT_KERNELS


@pytest.mark.parametrize("kernels", ["sm90", "xla"])
@pytest.mark.parametrize("has_experts", [False, True])
def test_there_are_times_of_every_kind(kernels, has_experts):
    kind = kind_of(MEASURED[0])._replace(kernels=kernels, has_experts=has_experts)
    assert estimate_step(kind, 1e-3, num_rows=8).seconds > 5e-4
    assert estimate_prefill(kind, 1e-3, num_tokens=512).seconds > 5e-4


def test_an_h100_is_predicted_from_runs_of_an_h200():
    """The runs are those of the days before the H100 was measured."""
    of_h100 = [(batches, run) for batches, run in RUNS if batches.gpu == "h100" and batches.num_devices == 1]
    of_h200 = tuple(batches for batches in MEASURED if batches.gpu == "h200" and batches.date < "2026-11-28")
    assert len(of_h100) == 3
    for batches, run in of_h100:
        found = estimate_step(kind_of(batches), run.work / 1e3, num_rows=run.num_rows, measured=of_h200)
        assert found.seconds * 1e3 == pytest.approx(run.step, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("batches", MEASURED, ids=lambda batches: f"{batches.shape} {batches.options}")
def test_work_of_measured_steps(batches):
    with held_out.absent_engine(batches) as engine:
        builder, model = engine.plan.builder, engine.model
        assert (model.num_layers, builder.model.mesh.size) == (batches.num_layers, batches.num_devices)
        assert len(builder.models) == batches.num_stages
        assert (builder.model.layout.num_states > 0) == batches.has_states
        info = engine.info(engine.num_blocks)
        for run in batches.runs:
            if run.prefill_work is not None:
                work = prefill_work(model, info, num_rows=run.num_rows, length=run.input_len)
                seconds = work.seconds(engine.gpu, num_devices=batches.num_devices)
                assert seconds * 1e3 == pytest.approx(run.prefill_work, rel=0.01)
    for run, speed in held_out.planned(batches):
        assert speed.work_ms == pytest.approx(run.work, abs=0.02)


def test_plans_of_later_measurements(monkeypatch, capsys):
    """Each run stands beside what earlier ones say, and the error of stages is what plans state."""
    (stages,) = [batches for batches in MEASURED if batches.num_stages > 1]
    some = [batches for batches in MEASURED if batches.date < stages.date or batches == stages]
    monkeypatch.setattr(held_out, "MEASURED", tuple(some))
    held_out.main(["--since", stages.date])
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split("|")[4].strip() for line in lines[2:]] == [f"{run.step:.2f}" for run in stages.runs]
    assert float(last.removeprefix("stages: ").removesuffix("% of 3 runs")) / 100 == pytest.approx(
        times.OF_STAGES, abs=0.005
    )
    with pytest.raises(SystemExit):
        held_out.main(["--since", "2000-01-01"])


@pytest.mark.parametrize("target", [None, 1000.0, 10.0, 5.0, 3.0, 0.1])
def test_the_target_chooses_how_many_run_at_once(tmp_path, target):
    engine = absent_engine("llama-3-8b", tmp_path)
    info = engine.info(engine.num_blocks)
    load = SizedLoad(input_len=1024, output_len=256, target_tpot=target)
    chosen = choose(engine, info, load, num_requests=256)
    if target == 0.1:
        assert chosen is None
    elif target in (None, 1000.0):
        assert chosen.num_requests == 256
    elif chosen is not None:
        assert chosen.step_ms <= target
        assert speed_of(engine, info, load, num_requests=chosen.num_requests + 1).step_ms > target


@pytest.mark.parametrize(("context", "lengths"), [(8192, (1024, 256)), (512, (256, 128)), (1, (1, 1))])
def test_lengths_that_are_not_given_fit_the_context(context, lengths):
    sized = Load().within(context)
    assert (sized.input_len, sized.output_len) == lengths
    given = Load(input_len=7, output_len=9).within(context)
    assert (given.input_len, given.output_len) == (7, 9)


def test_splits_are_ranked(tmp_path):
    config = config_of("llama-3-70b", tmp_path)
    plan = make_plan(config, GPUS["h100"], Load(), name="the 70B", compiling="none")
    assert not plan.fits
    assert plan.why_not.startswith("the 70B needs 131.4 GiB a device for its weights")
    assert [(split.tensor_parallel_size, split.fits) for split in plan.splits][-1] == (1, False)
    rates = [split.output_tokens_per_second for split in plan.splits if split.fits]
    assert rates == sorted(rates, reverse=True)
    sizes = {(split.tensor_parallel_size, split.pipeline_parallel_size): split for split in plan.splits}
    assert {tensor * stages * split.replicas for (tensor, stages), split in sizes.items()} == {8}
    assert {(2, 4), (1, 2)} < {size for size, split in sizes.items() if split.fits}
    assert all(split.fits for (_, stages), split in sizes.items() if stages > 1)


def test_whole_experts_are_ways_of_models_that_have_them(tmp_path):
    """They wait for the device that reads most experts, which matters little where all are read."""
    config = config_of("qwen3-30b-a3b", tmp_path, max_num_seqs=64)
    plan = make_plan(config, GPUS["h200"], Load(target_tpot=50), name="m", compiling="none", num_devices=2)
    ways = {(way.tensor_parallel_size, way.pipeline_parallel_size, way.enable_expert_parallel) for way in plan.splits}
    assert ways == {(1, 1, False), (2, 1, False), (2, 1, True), (1, 2, False)}
    shards, whole = (
        absent_engine("qwen3-30b-a3b", tmp_path, tensor_parallel_size=2, enable_expert_parallel=is_whole)
        for is_whole in (False, True)
    )
    factors = [
        speed_of(whole, whole.info(1000), LOAD, num_requests=count).work_ms
        / speed_of(shards, shards.info(1000), LOAD, num_requests=count).work_ms
        for count in (1, 8, 256)
    ]
    assert 1.5 > factors[0] > factors[1] > factors[2] == pytest.approx(1, abs=1e-4)


def test_a_step_reads_no_pools_of_other_layers(tmp_path):
    """Blocks of Gemma 4 have room for heads of both shapes, and are used for one; other models' blocks are full."""
    fields = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 12,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    }
    config = EngineConfig(model=str(write_config(tmp_path, fields)), dtype="bfloat16", max_model_len=32768)
    info = declare(config, GPUS["h200"], to_compile=False).info(1000)
    assert len(info.kv_kinds) == 2
    of_windows, of_others = (2 * 2 * layers * size for layers, size in ((10, 4 * 256), (2, 512)))
    assert info.kv_bytes_read(8192) == 1024 * of_windows + 8192 * of_others < info.kv_bytes(8192)
    info = absent_engine("llama-3-8b", tmp_path).info(1000)
    assert info.kv_bytes_read(100) == info.kv_bytes(100)


@pytest.mark.parametrize(("shape", "more"), [("llama-3-8b", 0), ("gemma-3-4b", 1)])
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_hold_their_layers(tmp_path, shape, more, stages):
    """All stages together have the model's weights and KV; a tied embedding is on the first and on the last one."""
    whole = absent_engine(shape, tmp_path)
    engine = absent_engine(shape, tmp_path, pipeline_parallel_size=stages)
    sizes = sizes_of(engine)
    parts = sizes.stages
    layers = [layer for part in parts for layer in range(part.first_layer, part.first_layer + part.num_layers)]
    assert layers == list(range(whole.model.num_layers))
    tied = more * whole.model.head_bytes
    assert sum(part.weight_bytes for part in parts) == pytest.approx(sizes_of(whole).weight_bytes + tied, rel=1e-3)
    assert sum(part.kv_bytes for part in parts) == engine.info(sizes.num_blocks).kv_cache_bytes
    assert sizes.weight_bytes == max(part.weight_bytes for part in parts)
    assert all(part.weight_bytes + part.kv_bytes + sizes.step_bytes < sizes.usable_bytes for part in parts)


@pytest.mark.parametrize("num_requests", [1, 2, 64, 255])
def test_stages_are_timed_and_wait_as_simulated(tmp_path, num_requests):
    engine = absent_engine("llama-3-8b", tmp_path, pipeline_parallel_size=4)
    info = engine.info(engine.num_blocks)
    speed = speed_of(engine, info, LOAD, num_requests=num_requests)
    in_flight = min(num_requests, 4)
    assert speed.bubble == pytest.approx(simulate(speed.stage_ms, num_in_flight=in_flight), abs=0.02)
    assert speed.step_ms >= max(sum(speed.stage_ms), in_flight * max(speed.stage_ms))
    assert speed.step_error >= times.UNLIKE_ANY
    one = absent_engine("llama-3-8b", tmp_path)
    alone = speed_of(one, one.info(one.num_blocks), LOAD, num_requests=1)
    if num_requests == 1:
        assert speed.step_ms == pytest.approx(alone.step_ms, rel=0.1)  # no faster than without stages


def test_a_head_count_that_does_not_divide_is_a_row_of_the_table(tmp_path):
    plan = make_plan(
        config_of("llama-100m", tmp_path, dtype="bfloat16"), GPUS["h200"], Load(), name="m", compiling="none"
    )
    assert plan.fits
    (refused,) = [split for split in plan.splits if not split.fits]
    assert "cannot be split evenly over 8 devices" in refused.why_not


def test_a_model_without_a_kernel_is_refused_as_engines_refuse_it(tmp_path):
    config = config_of("llama-100m", tmp_path, dtype="bfloat16", hf_overrides={"head_dim": 40})
    with pytest.raises(
        ConfigError, match=r"no kernel for this model: head_dim must be .* 40; ask for .* --kernels xla"
    ):
        make_plan(config, GPUS["h200"], Load(), name="m", compiling="none")
    assert make_plan(config, GPUS["a100"], Load(), name="m", compiling="none").fits


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("llama-3-8b", {"kv_cache_dtype": "fp8"}),
        ("llama-3-8b", {"tensor_parallel_size": 4}),
        ("qwen3-30b-a3b", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ],
)
def test_errors_of_what_was_not_measured_are_larger(tmp_path, shape, options):
    engine = absent_engine(shape, tmp_path, **options)
    speed = speed_of(engine, engine.info(engine.num_blocks), LOAD, num_requests=64)
    assert speed.step_error >= times.UNLIKE_ANY


def test_smaller_models_take_no_less_with_more_rows(tmp_path):
    """Layers of a thousandth of the size of those that were measured."""
    engine = absent_engine("llama-100m", tmp_path, dtype="bfloat16", hf_overrides={"intermediate_size": 64})
    speeds = [speed_of(engine, engine.info(engine.num_blocks), LOAD, num_requests=n) for n in (1, 16, 256)]
    assert all(speed.step_ms >= speed.work_ms * 0.9 for speed in speeds)


def test_without_a_compiler_sizes_are_computed_and_the_plan_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxserve.planning.plan.can_compile", lambda: False)
    plan = make_plan(config_of("llama-3-8b", tmp_path), GPUS["h200"], Load(), name="m")
    assert not plan.sizes.is_compiled
    assert "jax's CUDA plugin, which compiles for absent GPUs, is not installed" in plan.how_sized
    monkeypatch.setattr("jaxserve.planning.ahead.can_compile", lambda: False)
    with pytest.raises(ConfigError, match="compiling for an absent GPU needs jax's CUDA plugin"):
        compile_ahead(config_of("llama-3-8b", tmp_path), GPUS["h200"], tmp_path / "p", name="m")


def test_what_does_not_fit_raises(tmp_path):
    with pytest.raises(OutOfMemory, match=r"29\.9 GiB a device for its weights, but 13\.3 GiB are free"):
        sizes_of(absent_engine("llama-3-8b", tmp_path, "t4", dtype="float32"))


@NO_COMPILER
def test_the_commands_find_the_plugin_before_kernels_are_imported():
    """Without its runtime no kernel compiles."""
    code = (
        "from jaxserve.planning.commands import prepare_jax; prepare_jax(); import jax, jaxserve.planning.plan, os; "
        "print(os.environ['MOSAIC_GPU_RUNTIME_LIB_PATH'], jax.config.jax_enable_compilation_cache)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOSAIC")}
    found = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert found.stdout.split()[-2].endswith("libmosaic_gpu_runtime.so")
    assert found.stdout.split()[-1] == "False"


@pytest.mark.slow
@NO_COMPILER
@pytest.mark.parametrize(("device", "num_spills"), [("h100", 0), ("a100", 0)])
def test_programs_are_compiled_for_an_absent_gpu(tmp_path, device, num_spills):
    fields = SHAPES["llama-100m"] | {"num_hidden_layers": 2, "dtype": "bfloat16"}
    config = EngineConfig(model=str(write_config(tmp_path, fields)), max_num_batched_tokens=512, max_num_seqs=16)
    plan = make_plan(config, GPUS[device], Load(), name="m", num_devices=1)
    assert plan.sizes.is_compiled
    names = [program.name for program in plan.sizes.programs]
    assert (names[0], names[-1]) == ("Forward 512", "PlainDecode 16")
    kernels = [kernel for program in plan.sizes.programs for kernel in program.kernels]
    assert bool(kernels) == GPUS[device].has_kernels
    assert sum(kernel.spill_bytes for kernel in kernels) == num_spills
    assert all(program.num_launches for program in plan.sizes.programs)


@pytest.mark.slow
@NO_COMPILER
def test_a_folder_of_programs_is_written(tmp_path):
    fields = SHAPES["llama-100m"] | {"num_hidden_layers": 1, "dtype": "bfloat16"}
    config = EngineConfig(
        model=str(write_config(tmp_path, fields)), max_num_batched_tokens=16, max_num_seqs=4, max_model_len=512
    )
    folder = tmp_path / "programs"
    folder.mkdir()
    of_an_earlier_call = folder / MANIFEST, folder / "a program"
    for path in of_an_earlier_call:
        path.write_text("replaced")
    written = compile_ahead(config, GPUS["h200"], folder, name="m")
    assert written.num_executables >= 1
    assert written.num_lowered > written.num_executables
    assert [path.exists() for path in of_an_earlier_call] == [True, False]
    engine = declare(config, GPUS["h200"], to_compile=True)
    assert written.num_blocks == engine.num_blocks
    assert any(
        may_be_shipped(engine, program) == (not engine.plan.builder.is_tuned(program))
        for program in engine.plan.builder.shapes.programs
        if isinstance(program, PlainDecode)
    )
    with pytest.raises(ConfigError, match="is not empty, and no folder of programs"):
        compile_ahead(config, GPUS["h200"], tmp_path, name="m")
