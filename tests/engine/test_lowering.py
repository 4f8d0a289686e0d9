"""Steps that other processes have lowered, or that were on disk, are those that this process would have made."""

import concurrent.futures
import contextlib
import logging
import os
import pathlib
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from engine_harness import GOLDENS, MAX_MODEL_LEN, Model, request, run
from waiting import PATIENCE

from jaxserve.execution.programs import lowering as lowering_module
from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.execution.programs.kinds import Begin, Finish
from jaxserve.execution.programs.lowering import Lowering
from jaxserve.execution.programs.model import StepModel
from jaxserve.execution.programs.spec import ON_GPU, StepSpec
from jaxserve.execution.programs.workers import Worker
from jaxserve.execution.runner import Runner
from jaxserve.layers import launch
from jaxserve.layers.sharding import with_explicit_axes
from jaxserve.loading.huggingface import load_config
from jaxserve.sampling_params import SamplingParams

NAME = "llama_biases_linear_rope"
SPEC = StepSpec(
    model=load_config(GOLDENS / NAME),
    dtype="float32",
    kernels="xla",
    block_size=4,
    max_model_len=MAX_MODEL_LEN,
    max_num_seqs=4,
    max_num_batched_tokens=8,
    traits=ON_GPU,
    has_peers=True,
)
NUM_BLOCKS = 60
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=3),
    SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={3: 2.0}),
]


def make_builder(spec=SPEC, num_devices=1):
    mesh = jax.make_mesh((num_devices,), ("tensor",), devices=jax.devices()[:num_devices])
    return StepBuilder(spec, with_explicit_axes(mesh))


def path_of(builder, folder, program, num_blocks):
    job = lowering_module.Job(program, num_blocks)
    return lowering_module._path(folder, lowering_module.settings_of(builder), job)


def make_engine(num_devices=1, lowering=None):
    """Return an engine of `SPEC` with every step compiled, and its runner."""
    model = Model(NAME, tensor_parallel_size=num_devices)
    runner = model.runner = Runner(make_builder(num_devices=num_devices), model.params, lowering=lowering)
    runner.set_num_blocks(NUM_BLOCKS)
    runner.warm_up(progress=False)
    runner.allocate()
    return model.engine(max_num_seqs=4, max_num_batched_tokens=8), runner


def answers(engine):
    """Return the results of requests of all kinds, in steps of all kinds."""
    random = np.random.default_rng(0)
    results = {}
    for params in ([KINDS[0]] * 4, [KINDS[1], KINDS[0]], KINDS):
        requests = [
            request(f"r{len(results)}-{i}", random.integers(0, 90, 3 + 5 * i).tolist(), 6, params[i])
            for i in range(len(params))
        ]
        results |= run(engine, requests)
    return {
        name: (result.token_ids, result.logprobs, result.prompt_logprobs, result.error)
        for name, result in results.items()
    }


@pytest.fixture(scope="module")
def on_two():
    """The runner of an engine on two devices whose steps are this process's, and its answers."""
    engine, runner = make_engine(num_devices=2)
    return runner, answers(engine)


@pytest.mark.slow
def test_the_same_answers(on_two, tmp_path, caplog):
    """With steps from this process, from workers, and from the workers' files on disk."""
    num_devices, (_, expected) = 2, on_two
    assert all(error is None for *_, error in expected.values())
    num_programs = len(make_builder().shapes.programs)
    for num_found in (0, num_programs):
        lowering = Lowering(make_builder(num_devices=num_devices), folder=tmp_path / "steps", num_workers=2)
        engine, runner = make_engine(num_devices, lowering)
        assert lowering.num_found == num_found
        assert len(lowering._workers) == (0 if num_found else 2)
        assert all(worker._process.poll() is not None for worker in lowering._workers)  # ended by `allocate`
        num_compiles = runner.num_compiles
        assert answers(engine) == expected
        assert (runner.num_compiles, runner.num_recompiles_after_warmup) == (num_compiles, 0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.slow
def test_workers_that_were_started_early_get_the_first_jobs():
    early = [Worker(), Worker()]
    builder = make_builder()
    lowering = Lowering(builder, folder=None, num_workers=3, early=early)
    program = builder.shapes.programs[-1]
    assert "jit_call" in lowering.lower(program, NUM_BLOCKS).as_text()  # by a worker
    assert lowering._workers[1:] == early[::-1]
    assert lowering._idle.get() is early[0]
    lowering.close()
    unused = Worker()
    Lowering(builder, folder=None, num_workers=0, early=[unused]).close()
    assert all(worker._process.poll() is not None for worker in [*lowering._workers, unused])


@pytest.mark.slow
def test_the_same_answers_of_prompts_in_two_programs(on_two, monkeypatch):
    """From the bytes that a worker would send."""
    num_devices, (_, expected) = 2, on_two
    monkeypatch.setattr(StepModel, "may_be_two_programs", True)
    monkeypatch.setattr(launch, "MIN_LAYERS", 2)
    monkeypatch.setattr(launch, "FIRST_PROGRAM", 2)
    monkeypatch.setitem(launch.CUTS, "in programs", (1,))
    builder = make_builder(num_devices=num_devices)

    monkeypatch.setattr(Lowering, "_make", lambda _, job: builder.export(job.program, job.num_blocks))
    engine, runner = make_engine(num_devices, Lowering(builder, folder=None, num_workers=1))
    programs = {type(program) for program, _ in runner.steps.items()}
    assert {Begin, Finish} <= programs
    assert answers(engine) == expected


def test_a_cache_of_other_sizes_or_broken_files_is_not_used(tmp_path):
    builder = make_builder()
    program = builder.shapes.programs[-1]
    lowering = Lowering(builder, folder=tmp_path, num_workers=0)
    path, content, texts = path_of(builder, tmp_path, program, NUM_BLOCKS), None, set()
    damages = [
        lambda _: b"",
        lambda _: b"no hash",
        lambda whole: whole[:-1],
        lambda whole: whole.replace(b"\n", b"\n\n", 1),
    ]
    for damage in (None, *damages):
        if damage is not None:
            path.write_bytes(damage(content))
        texts.add(lowering.lower(program, NUM_BLOCKS).as_text())  # a step has the lines that lowered it
        assert lowering.num_found == 0
        assert content in (None, path.read_bytes())
        content = path.read_bytes()
    texts.add(lowering.lower(program, NUM_BLOCKS).as_text())
    assert len(texts) == 1
    assert lowering.num_found == 1
    lowering.lower(program, NUM_BLOCKS + 1)
    assert lowering.num_found == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_steps_on_disk_that_were_used_last_stay(tmp_path, monkeypatch, caplog):
    builder = make_builder()
    programs = builder.shapes.programs[-4:]

    def lower(*programs):
        """Return how many programs were found, and all remaining files."""
        lowering = Lowering(builder, folder=tmp_path, num_workers=0)
        for program in programs:
            lowering.lower(program, NUM_BLOCKS)
        lowering.close()
        return lowering.num_found, {path.name for path in tmp_path.iterdir()}

    def path(program):
        return path_of(builder, tmp_path, program, NUM_BLOCKS)

    paths = [path(program) for program in programs]
    assert lower(*programs) == (0, {path.name for path in paths})
    size = sum(paths[i].stat().st_size for i in (0, 2, 3))
    monkeypatch.setattr(lowering_module, "MAX_KEPT_BYTES", size + 1000)  # a step has the lines that lowered it
    paths[3].unlink()
    for seconds, kept in enumerate(paths[:3]):
        os.utime(kept, (seconds, seconds))
    assert lower(programs[0]) == (1, {path.name for path in paths[:3]})
    assert lower(programs[3]) == (0, {paths[i].name for i in (0, 2, 3)})  # 0 was the oldest until it was used
    monkeypatch.setattr(lowering_module, "MAX_KEPT_BYTES", 0)
    assert lower(programs[0]) == (1, {paths[i].name for i in (0, 2, 3)})  # a start that has found all prunes nothing
    assert lower(programs[1]) == (0, set())
    assert not caplog.text


def test_a_step_that_cannot_be_kept_leaves_no_file(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(lowering_module.os, "replace", fail)
    builder = make_builder()
    Lowering(builder, folder=tmp_path, num_workers=0).lower(builder.shapes.programs[-1], NUM_BLOCKS)
    assert "a lowered step is not kept: disk full" in caplog.text
    assert not list(tmp_path.iterdir())


def test_what_a_lowered_step_is_made_from(monkeypatch):
    def paths(spec=SPEC, folder=GOLDENS):
        builder = make_builder(spec)
        programs = make_builder().shapes.programs
        return {path_of(builder, folder, program, size) for program in programs for size in (50, 60)}

    first = paths()
    assert len(first) == 2 * len(make_builder().shapes.programs)
    assert paths() == first
    for other in ({"max_model_len": 32}, {"dtype": "bfloat16"}, {"model": SPEC.model | {"rope_theta": 5.0}}):
        assert not paths(lowering_module.msgspec.structs.replace(SPEC, **other)) & first
    endless, none = (
        paths(lowering_module.msgspec.structs.replace(SPEC, model=SPEC.model | {"some_limit": limit}))
        for limit in (float("inf"), None)
    )
    assert not endless & none
    monkeypatch.setattr(lowering_module, "versions", lambda: {"code": "other"})
    assert not paths() & first


@pytest.mark.slow
def test_all_code_of_a_step_is_hashed():
    script = """
import sys
import jaxserve.execution.programs.lowering_worker
for name, module in sys.modules.items():
    if name.startswith(("jaxserve", "pallas_kernels")):
        print(module.__file__)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    package = pathlib.Path(lowering_module.__file__).parents[2]
    code = [(package / name).resolve() for name in lowering_module.CODE]
    files = {pathlib.Path(file).resolve() for file in ran.stdout.split()} - {package.resolve() / "__init__.py"}
    assert len(files) > 20
    assert not [file for file in files if not any(file.is_relative_to(root) for root in code)]


@pytest.mark.slow
def test_options_of_jax_hold_in_workers_and_on_disk(tmp_path):
    spec = lowering_module.msgspec.structs.replace(SPEC, dtype="bfloat16")
    builder = make_builder(spec)
    program = builder.shapes.largest

    def lower():
        with contextlib.closing(Lowering(builder, folder=tmp_path, num_workers=1)) as lowering:
            return lowering.lower(program, NUM_BLOCKS).as_text().count("HIGHEST"), lowering.num_found

    by_default = builder.lower(program, NUM_BLOCKS).as_text().count("HIGHEST")
    assert lower() == (by_default, 0)
    with jax.default_matmul_precision("highest"):
        precise = builder.lower(program, NUM_BLOCKS).as_text().count("HIGHEST")
        assert precise > by_default
        assert lower() == (precise, 0)
        assert lower() == (precise, 1)
    assert lower() == (by_default, 1)


def test_code_that_does_not_lie_in_files_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(lowering_module, "versions", lambda: None)
    builder = make_builder()
    Lowering(builder, folder=tmp_path, num_workers=0).lower(builder.shapes.programs[-1], NUM_BLOCKS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("executable", ["/nowhere/python", "", None])
def test_where_no_worker_starts_this_process_lowers(monkeypatch, caplog, executable):
    builder = make_builder()
    program = builder.shapes.programs[-1]
    monkeypatch.setattr(sys, "executable", executable)
    lowering = Lowering(builder, folder=None, num_workers=2)
    assert lowering.lower(program, NUM_BLOCKS).as_text() == builder.lower(program, NUM_BLOCKS).as_text()
    assert "lowered in this process: no worker can be started" in caplog.text


@pytest.mark.slow
def test_a_prepared_step_is_waited_for(tmp_path):
    builder = make_builder()
    lowering = Lowering(builder, folder=tmp_path, num_workers=0)
    lowering.prepare(builder.shapes.largest, 24)
    lowered = lowering.lower(builder.shapes.largest, 24)
    assert len(list(tmp_path.iterdir())) == 1
    assert lowering.num_found == 0
    assert lowered.compile().memory_analysis() is not None


def test_nothing_is_lowered_after_the_end(caplog):
    """A process that ends would take seconds for what nobody needs."""
    builder = make_builder()
    program = builder.shapes.programs[-1]
    lowering = Lowering(builder, folder=None, num_workers=2)
    lowering.prepare(program, NUM_BLOCKS)
    lowering.close()
    with pytest.raises(concurrent.futures.CancelledError):
        lowering.lower(program, NUM_BLOCKS)
    assert not caplog.text


@pytest.mark.slow
def test_one_worker_that_is_killed_costs_one_step(caplog):
    builder = make_builder()
    programs = builder.shapes.programs[-3:]
    with contextlib.closing(Lowering(builder, folder=None, num_workers=2)) as lowering:
        lowering.lower(programs[0], NUM_BLOCKS)
        process = lowering._idle.queue[-1]._process  # the next to work
        process.kill()
        process.wait()
        for program in programs:
            lowering.lower(program, NUM_BLOCKS)
        assert caplog.text.count("lowered in this process: its worker has gone") == 1
        assert all(worker._process.poll() is None for worker in lowering._workers)
        assert len(lowering._workers) == lowering._idle.qsize() == 2


@pytest.mark.slow
def test_what_is_printed_in_a_worker_is_no_answer(tmp_path, monkeypatch, caplog, capfd):
    (tmp_path / "sitecustomize.py").write_text("import os; print('hello'); os.write(1, b'descriptor 1')")
    monkeypatch.syspath_prepend(tmp_path)
    builder = make_builder()
    with contextlib.closing(Lowering(builder, folder=None, num_workers=1)) as lowering:
        lowering.lower(builder.shapes.programs[-1], NUM_BLOCKS)
    assert not caplog.text
    captured = capfd.readouterr()
    assert "hello" in captured.err
    assert "descriptor 1" in captured.err
    assert not captured.out


@pytest.mark.slow
def test_a_step_that_cannot_be_lowered_is_an_error_here():
    """With the error of this process, whatever the worker has said."""
    spec = lowering_module.msgspec.structs.replace(SPEC, kernels="sm90")  # which want 16 bits
    builder = make_builder(spec)
    closing = contextlib.closing(Lowering(builder, folder=None, num_workers=1))
    with closing as lowering, pytest.raises(NotImplementedError, match="float32"):
        lowering.lower(builder.shapes.largest, NUM_BLOCKS)


@pytest.mark.slow
def test_workers_end_with_a_parent_that_is_killed():
    script = f"""
import sys
sys.path += {[str(path) for path in pathlib.Path(__file__).parents[:2]]!r}
from test_lowering import SPEC, Lowering, make_builder
if __name__ == "__main__":
    lowering = Lowering(make_builder(), folder=None, num_workers=2)
    lowering.lower(make_builder().shapes.programs[-1], 7)
    print("ready", flush=True)
    sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    # Workers have their parent's standard error: it ends with the last of them.
    ended = threading.Thread(target=parent.stderr.read)
    ended.start()
    assert parent.stdout.readline() == b"ready\n"
    parent.kill()
    ended.join(PATIENCE)
    assert not ended.is_alive()
    parent.wait()
    parent.stdin.close(), parent.stdout.close(), parent.stderr.close()


@pytest.mark.slow
def test_empty_steps_change_nothing(on_two):
    runner, _ = on_two  # its requests have left KV and slots behind
    state = jax.tree.map(np.asarray, (runner.state["kv_cache"], runner.state["slots"]))
    num_compiles = runner.num_compiles
    runner.run_empty_steps()
    jax.tree.map(np.testing.assert_array_equal, (runner.state["kv_cache"], runner.state["slots"]), state)
    assert runner.num_compiles == num_compiles
