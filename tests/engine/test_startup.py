"""What a model may cost: memory of hosts and devices, and how much of it is left for the KV cache."""

import dataclasses
import json
import logging
import math
import pathlib
import threading

import jax
import numpy as np
import pytest
from depths import quick_first
from engine_harness import GOLDENS, Model, request, run
from few_sizes import every_size
from waiting import PATIENCE, wait_until

from jaxserve.bench.shapes import QWEN3_30B_A3B
from jaxserve.config import EngineConfig
from jaxserve.engine import device, report, sizing, startup
from jaxserve.engine.checkpoint import read_checkpoint
from jaxserve.engine.client import EngineInfo
from jaxserve.engine.sizing import choose_num_blocks
from jaxserve.errors import CheckpointError, ConfigError, OutOfMemory
from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.execution.programs.kinds import Draw, PromptLogprobs
from jaxserve.execution.programs.lowering import Lowering
from jaxserve.execution.programs.model import StepModel
from jaxserve.execution.programs.spec import StepSpec
from jaxserve.execution.runner import Runner
from jaxserve.layers.layouts import shard_bytes
from jaxserve.models import get_family
from jaxserve.scheduling.block_needs import BlockNeeds

CONFIG = EngineConfig(
    model=str(GOLDENS / "llama_biases_linear_rope"), load_format="dummy", max_model_len=64, warmup="none"
)


def test_page_cache_is_memory_to_be_had(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 16000 kB\nMemFree:    100 kB\nMemAvailable:   5000 kB\n")
    monkeypatch.setattr(device, "MEMINFO", meminfo)
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    assert device.free_memory(mesh) == 2500 * 1024
    monkeypatch.setattr(device, "MEMINFO", pathlib.Path("/no/such/file"))
    assert device.free_memory(mesh) > 2**27


def test_weights_of_every_step_and_of_experts():
    family = get_family(QWEN3_30B_A3B)
    config = family.config(QWEN3_30B_A3B)
    experts = 48 * 128 * 3 * 768 * 2048
    attention = 48 * (2 * 32 + 2 * 4) * 128 * 2048
    rest = 151_936 * 2048 + 48 * 128 * 2048
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    specs = family.param_specs(config)
    assert report.bytes_read(specs, dtype=np.dtype(np.float16)) == (2 * (attention + rest + norms), 2 * experts)
    copied = 2 * 2 * (attention + 48 * 128 * 2048 + norms)  # the head and the experts are split
    read = report.bytes_read(specs, dtype=np.dtype(np.float16), num_copies=3)
    assert read == (2 * (attention + rest + norms) + copied, 2 * experts)


def test_embeddings_of_layers_are_read_by_the_row():
    family = get_family({"model_type": "gemma3n_text"})
    config = family.config({})
    specs = family.param_specs(config)
    assert report.bytes_read(specs, dtype=np.dtype(np.float16)) == (2 * (6_835_235_568 - 262_144 * 35 * 256), 0)


@pytest.mark.parametrize(("num_tokens", "num_bytes"), [(0, 100), (1, 140), (2, 177.5), (10_000, 740)])
def test_more_tokens_read_more_experts(num_tokens, num_bytes):
    limits = dict.fromkeys(
        ("vocab_size", "hidden_size", "max_model_len", "block_size", "num_blocks", "max_num_seqs"), 1
    ) | {"max_num_batched_tokens": 1}
    weights = {"weight_bytes": 100, "expert_bytes": 640, "expert_fraction": 8 / 128}
    info = EngineInfo(model="m", eos_token_ids=(), kv_kinds=(), **limits, **weights)
    assert info.expected_weight_bytes(num_tokens) == pytest.approx(num_bytes)


def mesh_of(**sizes):
    num_devices = math.prod(sizes.values())
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=jax.devices()[:num_devices])


@pytest.mark.parametrize("options", [{"max_num_seqs": 10**7}, {"max_num_batched_tokens": 10**9}])
def test_more_than_memory_has_room_for_is_refused_by_name(options):
    ((name, value),) = options.items()
    with pytest.raises(OutOfMemory, match=rf"{name}={value}.* need .* GiB a device .* are free beside the weights"):
        startup.start_engine(dataclasses.replace(CONFIG, **options), mesh=None, progress=False)


@pytest.mark.slow
def test_the_tensor_axis_splits_the_weights(monkeypatch):
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(Model("llama_biases_linear_rope").params))
    monkeypatch.setattr(startup, "free_memory", lambda mesh: whole - 1)
    monkeypatch.setattr(sizing.Sizing, "check_steps", lambda *args, **options: None)
    with pytest.raises(OutOfMemory, match="a device for its weights"):
        startup.start_engine(CONFIG, mesh=None, progress=False)
    engine, _ = startup.start_engine(CONFIG, mesh=mesh_of(data=1, tensor=2), progress=False)
    engine.runner.close()


RECURRENT = str(GOLDENS / "qwen3_5_biases")
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}


@pytest.mark.parametrize(
    ("axes", "options", "message"),
    [
        ({"model": 1}, {}, "the axes 'model' of 1, but what splits this model are axes named 'data' and 'tensor'$"),
        ({"model": 3}, {}, "'model' of 3, .* 'data' and 'tensor': 'model' .* the nearest is one axis 'tensor' of 3"),
        (
            {"data": 2},
            {"model": RECURRENT},
            "'data' of 2, but tokens of a model whose layers keep a state cannot",
        ),
        ({"expert": 2}, {}, "mesh has the axes 'expert' of 2, but this model has no experts: name that axis 'tensor'"),
        ({"tensor": 2}, {"tensor_parallel_size": 4}, "tensor_parallel_size is 4, but mesh has the axes 'tensor' of 2"),
        ({"tensor": 1}, {"tensor_parallel_size": 2}, "tensor_parallel_size is 2, but mesh has the axes 'tensor' of 1"),
        ({"tensor": 2}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2, .* give the mesh an axis 'pipe'"),
        ({"data": 2}, {"tensor_parallel_size": 2}, "tensor_parallel_size is 2, but mesh has the axes 'data' of 2"),
        ({"pipe": 3}, {}, "pipeline_parallel_size is 3, but this model has 2 layers, of which each stage needs one"),
        ({"pipe": 2}, DRAFTS, "speculative_config: stages of a pipeline verify no drafts"),
        (None, {"pipeline_parallel_size": 2, "tensor_parallel_size": 8}, "is 2 and .* is 8, 16 devices, but there are"),
        (None, {"pipeline_parallel_size": 20}, "pipeline_parallel_size is 20, but this model has 2 layers"),
        (None, {"enable_expert_parallel": True}, "enable_expert_parallel is true, but this model has no experts"),
    ],
)
def test_meshes_of_which_a_model_would_not_use_every_device(axes, options, message):
    mesh = None if axes is None else mesh_of(**axes)
    with pytest.raises(ConfigError, match=message) as failure:
        startup.start_engine(dataclasses.replace(CONFIG, **options), mesh=mesh, progress=False)
    assert "\n" not in str(failure.value)


@pytest.mark.slow
def test_meshes_that_fit():
    experts = dataclasses.replace(CONFIG, model=str(GOLDENS / "qwen3_moe_normalised"))
    without_experts = {"model": str(GOLDENS / "ministral_windows_by_layer"), "num_speculative_tokens": 2}
    for config, axes in [
        (dataclasses.replace(CONFIG, tensor_parallel_size=2), {"tensor": 2}),
        (dataclasses.replace(experts, tensor_parallel_size=2), {"expert": 2}),
        (dataclasses.replace(experts, speculative_config=without_experts), {"expert": 2}),
    ]:
        engine, _ = startup.start_engine(config, mesh=mesh_of(**axes), progress=False)
        engine.runner.close()


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"data": 2}, {"data": 2, "tensor": 2}], ids=str)
def test_the_cache_fills_each_device(axes):
    config, checkpoint = read_checkpoint(CONFIG, progress=False)
    plan = startup.make_plan(config, checkpoint, device.choose_devices(config, mesh_of(**axes)))
    [of_stage] = startup.size(plan)
    measured = dataclasses.replace(of_stage, kv_cache_memory=None)
    cache = plan.builder.model.kv_cache(measured.num_blocks(sizing.GPU_MEMORY_RESERVE + 2**30, 0))
    assert 0.9 * 2**30 < sum(map(shard_bytes, jax.tree.leaves(cache))) <= 2**30


OF_EXPERTS = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("options", "axes"),
    quick_first([(OF_EXPERTS, None), (OF_EXPERTS | {"pipeline_parallel_size": 2}, None), ({}, {"data": 2})]),
)
def test_tokens_of_whole_experts_are_counted(options, axes):
    """By an engine that has four of eight experts on each of two devices of a stage."""
    options = {"model": str(GOLDENS / "qwen3_moe_normalised"), "max_num_batched_tokens": 4} | options
    config = dataclasses.replace(CONFIG, **options)
    mesh = None if axes is None else mesh_of(**axes)
    engine, _ = startup.start_engine(config, mesh=mesh, progress=False)
    try:
        experts = engine.runner.states[0]["params"]["layers"][0]["mlp"]["experts"]
        assert [len(shard.data) for shard in experts["down"].values.addressable_shards] == [4, 4]
        run(engine, [request("one", [3, 4, 5, 6], 3)])
        loads = engine.runner.expert_loads(wait=True)
        num_computed, num_chosen = loads.sum(axis=1).tolist(), 3
        assert num_computed == [(4 + 3 - 1) * num_chosen] * 2, "in each of two layers"
        assert engine.stats().expert_tokens == tuple(loads.sum(axis=0))
        assert len(engine.stats().expert_tokens) == 8
    finally:
        engine.runner.close()


@pytest.mark.parametrize("where", ["set_num_blocks", "allocate"])
def test_a_start_that_fails_leaves_nothing_on_the_device(monkeypatch, where):
    allocate = Runner.allocate

    def fail(runner, *_):
        assert jax.tree.leaves(runner.state["params"])
        if where == "allocate":
            allocate(runner)
        raise RuntimeError("no more")

    monkeypatch.setattr(Runner, where, fail)
    before = len(jax.live_arrays())
    with pytest.raises(RuntimeError, match="no more") as failure:
        startup.start_engine(CONFIG, mesh=None, progress=False)
    assert failure.tb is not None  # with all its frames
    assert len(jax.live_arrays()) <= before


def test_an_eos_that_is_no_token_id(tmp_path):
    fields = json.loads((GOLDENS / "llama_biases_linear_rope" / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields | {"eos_token_id": "</s>"}))
    with pytest.raises(CheckpointError, match=f"^{path}: eos_token_id must be a token id or a list of them"):
        startup.start_engine(dataclasses.replace(CONFIG, model=str(tmp_path)), mesh=None, progress=False)


def test_a_start_without_room_for_the_cache_loads_nothing(monkeypatch):
    monkeypatch.setattr(startup, "load", lambda *_, **__: pytest.fail("weights are loaded"))
    with pytest.raises(OutOfMemory):
        startup.start_engine(dataclasses.replace(CONFIG, kv_cache_memory=1000), mesh=None, progress=False)


def test_a_cache_that_does_not_fit_names_the_flag_that_sizes_it(monkeypatch):
    def allocate(_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")

    monkeypatch.setattr(startup.Runner, "allocate", allocate)
    with pytest.raises(OutOfMemory, match=r"blocks \(lower --kv-cache-memory for fewer\) did not fit .*Out of memory$"):
        startup.start_engine(CONFIG, mesh=None, progress=False)


def test_weights_that_cannot_be_loaded_end_the_workers(monkeypatch):
    """Workers that lower steps meanwhile, and the threads that wait for them, end too."""
    started = []

    class Recorded(Lowering):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs, num_workers=2)
            started.append(self)

    def fail(*_, **__):
        started[0]._start()  # if no step has by now
        raise KeyboardInterrupt

    monkeypatch.setattr(startup, "Lowering", Recorded)
    monkeypatch.setattr(startup, "choose_kernels", lambda *_: "sm90")
    monkeypatch.setattr(startup, "load", fail)
    config = dataclasses.replace(CONFIG, max_num_batched_tokens=4, warmup="full", compilation_cache_dir="")
    with pytest.raises(KeyboardInterrupt):
        startup.start_engine(config, mesh=None, progress=False)
    (lowering,) = started
    assert len(lowering._workers) == 2
    assert all(worker._process.poll() is not None for worker in lowering._workers)
    for thread in [thread for thread in threading.enumerate() if thread.name == "lowering"]:
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.parametrize("warmup", quick_first(["none", "background", "full"]))
def test_what_kernels_cannot_do_shows_before_a_request_needs_it(monkeypatch, warmup):
    monkeypatch.setattr(startup, "choose_kernels", lambda *_: "sm90")
    config = dataclasses.replace(CONFIG, max_num_batched_tokens=4, warmup=warmup, compilation_cache_dir="")
    with pytest.raises(ConfigError, match=r"no kernel for this model: .* float32"):
        startup.start_engine(config, mesh=None, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("error", quick_first([KeyboardInterrupt, None]))
def test_steps_that_need_no_device_compile_while_weights_load(monkeypatch, error):
    """They do so whether the weights can be loaded or not."""
    runners = []

    class Recorded(Runner):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            runners.append(self)

    def wait_for_a_step(*args, **kwargs):
        wait_until(lambda: runners[0].num_compiles > 0)
        if error is not None:
            raise error
        return load(*args, **kwargs)

    load = startup.load
    monkeypatch.setattr(startup, "Runner", Recorded)
    monkeypatch.setattr(startup, "load", wait_for_a_step)
    monkeypatch.setattr(StepModel, "has_kernels", True)
    monkeypatch.setattr(StepBuilder, "is_tuned", lambda *_: False)
    monkeypatch.setattr(startup, "begin_to_lower", lambda of, *_, **__: Lowering(of, folder=None, num_workers=0))
    config = dataclasses.replace(CONFIG, max_num_batched_tokens=4, max_num_seqs=2, warmup="full")
    config = dataclasses.replace(config, compilation_cache_dir="")
    if error is not None:
        with pytest.raises(error):
            startup.start_engine(config, mesh=None, progress=False)
    else:
        engine, _ = startup.start_engine(config, mesh=None, progress=False)
        assert len(run(engine, [request("one", [1, 2, 3, 4, 5], 3)])["one"].token_ids) == 3
        assert engine.stats().num_recompiles_after_warmup == 0
        engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("jaxserve-compiling")]


@pytest.mark.slow
def test_where_there_are_kernels_workers_lower_the_steps(monkeypatch, tmp_path, caplog):
    """The next start finds these on disk."""
    monkeypatch.setattr(startup, "choose_kernels", lambda *_: "sm90")
    monkeypatch.setattr(startup, "StepSpec", lambda **fields: StepSpec(**fields | {"kernels": "xla"}))  # on this CPU
    monkeypatch.setattr(startup, "enable_persistent_cache", lambda _: tmp_path)
    caplog.set_level("INFO", logger="jaxserve")
    config = dataclasses.replace(CONFIG, max_num_batched_tokens=4, max_num_seqs=2, kv_cache_memory=2**20, warmup="full")
    # Forward passes, prompt logprobs and embeddings of 1, 2 and 4 tokens; draws and masks of 1 and 2 rows; admissions.
    num_programs = 3 * 3 + 2 + 2 + 2
    for num_found in (0, num_programs):
        caplog.clear()
        with every_size():
            engine, _ = startup.start_engine(config, mesh=None, progress=False)
        engine.add([request("one", [1, 2, 3, 4, 5], 3)])
        while engine.has_work:
            engine.step()
        assert engine.stats().num_recompiles_after_warmup == 0
        engine.close()
        assert f"({num_found} were cached)" in caplog.text
        assert "in this process" not in caplog.text
    assert len(list((tmp_path / "steps").iterdir())) == num_programs


@pytest.mark.slow
def test_what_steps_take():
    """Slots, the results of a forward pass, and the temporary memory needed to compute or use them."""
    runner = Model("llama_untied", num_blocks=24).runner  # as small a pool as it is measured with
    slots = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.state["slots"]))
    largest = runner.builder.shapes.largest
    others = [Draw(8, has_logprobs=True), PromptLogprobs(largest.bucket)]
    forward, *rest = [runner._lower(program).compile().memory_analysis() for program in (largest, *others)]
    left = forward.output_size_in_bytes - forward.alias_size_in_bytes
    assert left > 4 * 8 * runner.model.vocab_size  # logits, and more
    needed = [
        forward.temp_size_in_bytes,
        *(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes for memory in rest),
    ]
    assert min(needed) > 0
    assert runner.step_memory() == slots + left + max(needed)


@pytest.mark.slow
@pytest.mark.parametrize("warmup", ["none", "background"])
@pytest.mark.parametrize("expected", [10**6, 0])
def test_the_cache_is_what_steps_leave(monkeypatch, caplog, warmup, expected):
    """Steps are compiled for a cache that leaves room for their expected memory, and again if they need more."""
    available, weights = 10**8, sum(leaf.nbytes for leaf in jax.tree.leaves(Model("llama_biases_linear_rope").params))
    frees = iter([available, available - weights])
    monkeypatch.setattr(startup, "free_memory", lambda mesh: next(frees))
    monkeypatch.setattr(startup, "CPU_KV_CACHE_MEMORY", None)
    monkeypatch.setattr(sizing, "GPU_MEMORY_RESERVE", 1000)
    monkeypatch.setattr(sizing, "KV_CACHE_UNIT", 1)
    monkeypatch.setattr(StepBuilder, "expected_step_memory", property(lambda builder: expected))
    config = dataclasses.replace(CONFIG, max_num_batched_tokens=4, max_num_seqs=2, warmup=warmup)
    engine, info = startup.start_engine(config, mesh=None, progress=False)
    runner = engine.runner
    needed = runner.step_memory()
    num_recompiles = engine.stats().num_recompiles_after_warmup  # of programs that only the line before has waited for
    assert 0 < needed < 10**6
    trials = 0 if warmup == "background" else 2 * max(leaf.nbytes for leaf in jax.tree.leaves(runner.state["params"]))
    left = available - weights - trials - 1000 - max(needed, expected) - (1 if expected else 0)
    assert info.num_blocks == runner.num_blocks == left // runner.bytes_per_block
    assert ("compiling again" in caplog.text) == (expected == 0)
    engine.add([request("one", [1, 2, 3, 4, 5], 3)])
    while engine.has_work:
        engine.step()
    assert engine.stats().num_recompiles_after_warmup == num_recompiles
    engine.close()


def test_positions_of_a_huge_pool_are_int32():
    needs = BlockNeeds(windows=(None,), block_size=16, max_chunk=64)
    num_blocks = choose_num_blocks(2**50, 2**8, max_model_len=64, needs=needs)
    assert num_blocks * 16 + 2**20 < 2**31


@pytest.mark.slow
def test_an_automatic_context_is_what_memory_holds_of_the_models(caplog):
    caplog.set_level(logging.INFO, "jaxserve")

    def started(**options):
        config = dataclasses.replace(CONFIG, max_model_len="auto", **options)
        engine, info = startup.start_engine(config, mesh=None, progress=False)
        engine.close()
        return info

    whole = started()
    assert whole.max_model_len == 512
    assert "memory does not hold" not in caplog.text
    part = started(kv_cache_memory=6 * whole.kv_cache_bytes // whole.num_blocks)
    assert part.max_model_len == 6 * 16
    assert part.num_full_requests == 1
    assert "max_model_len is 96: memory does not hold the model's 512" in caplog.text
    with pytest.raises(OutOfMemory, match="lower --max-model-len"):
        started(kv_cache_memory=1)
