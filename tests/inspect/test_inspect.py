"""What `jaxserve.inspect` says of an engine, against its arrays, its programs and its counters."""

import math
import threading
import xml.etree.ElementTree

import jax
import pytest
from fake_client import FakeEngineClient
from tiny_model import write
from waiting import PATIENCE

from jaxserve import inspect
from jaxserve.engine.frontend import Frontend
from jaxserve.errors import ConfigError, EngineDead, InvalidRequest
from jaxserve.execution.programs.background import BackgroundWarmUp
from jaxserve.execution.programs.compile import CompiledSteps
from jaxserve.gpus import find_gpu
from jaxserve.inspect import Speed, find_collectives
from jaxserve.inspect.bubble import simulate
from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS = {
    "load_format": "dummy",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "warmup": "none",
    "progress": False,
}
SPEED = Speed(bytes_per_second=1e9, flops_per_second=1e12, name="a slow memory")


def test_a_gpu_that_is_not_there_has_the_speed_that_plans_assume():
    speed, gpu = Speed.of("H100"), find_gpu("h100")
    assert (speed.bytes_per_second, speed.flops_per_second) == (gpu.sustained_bandwidth, gpu.sustained_flops())
    assert speed.name == gpu.kind


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def llm(folder):
    """Two devices, four rows, and blocks for about two and a half requests of the tests."""
    with LLM(folder, tensor_parallel_size=2, kv_cache_memory=2**16, **OPTIONS) as llm:
        yield llm


def test_weights_are_the_arrays_of_the_engine(llm):
    weights, held = inspect.weights(llm), jax.tree.leaves(llm.client.engine.runner.state["params"])
    of_device = [shard.data.nbytes for array in held for shard in array.addressable_shards if shard.device.id == 0]
    assert weights.bytes_per_device == sum(of_device)
    assert weights.total_bytes == sum(shard.data.nbytes for array in held for shard in array.addressable_shards)
    assert sum(group.count for group in weights) == len(held)
    assert weights["qkv"].spec[0] == "tensor"
    assert (weights["qkv"].num_copies, weights["attention_norm"].num_copies) == (1, 2)
    assert weights["norm"].name == "norm"
    with pytest.raises(KeyError, match=r"nothing: there are embed, "):
        weights["nothing"]


def test_the_kv_cache_is_that_of_the_engine(llm):
    cache = inspect.kv_cache(llm)
    assert cache.total_bytes == llm.info.kv_cache_bytes
    assert all("tensor" in group.spec for group in cache)


def test_a_step_has_the_sums_of_its_layers_and_a_gather_of_logits(llm):
    step = inspect.step(llm, rows=2, context=8, speed=SPEED)
    num_layers = llm.client.engine.runner.model.config.num_layers
    counts = {(each.kind, each.place): each.count for each in step.collectives}
    assert counts["all-reduce", "attention"] == counts["all-reduce", "mlp"] == num_layers
    assert counts["all-gather", "lm_head"] == 1
    assert {each.group_size for each in step.collectives} == {2}
    program = step.programs[0]
    assert program.argument_bytes > program.donated_bytes > 0
    assert program.flops > 0
    assert program.bytes_accessed > 0
    assert "dot_general" in str(step.jaxpr)
    assert "all-reduce" in step.hlo
    assert any("XLA" in line for line in step.paths)


def test_the_roofline_counts_what_a_device_reads_and_multiplies(llm):
    roofline = inspect.step(llm, rows=2, context=8, speed=SPEED).roofline
    weights = inspect.weights(llm)
    unread = 0 if "lm_head" not in llm.client.engine.runner.model.params else weights["embed"].bytes_per_device
    assert roofline.weight_bytes == weights.bytes_per_device - unread
    assert roofline.kv_bytes == 2 * llm.info.kv_bytes_read(8) / 2
    matrices = [group for group in weights if len(group.shape) > 1 and group.name != "embed"]
    products = 2 * sum(group.count * math.prod(group.shape) for group in matrices)
    if "lm_head" not in llm.client.engine.runner.model.params:
        products += 2 * math.prod(weights["embed"].shape)
    assert roofline.flops == 2 * products / 2
    assert (roofline.bound, roofline.floor) == ("memory", (roofline.weight_bytes + roofline.kv_bytes) / 1e9)
    assert roofline.fraction is None


def test_the_speed_of_a_device_is_measured():
    for num_bytes in (1, 2**20):
        speed = Speed.measure(jax.devices()[1], num_bytes=num_bytes)
        assert speed.bytes_per_second > 0
        assert speed.flops_per_second > 0


def test_a_step_is_measured_by_requests(llm):
    roofline = inspect.step(llm, rows=2, context=8, speed=SPEED, measure=True).roofline
    assert roofline.measured > 0
    assert roofline.fraction == roofline.floor / roofline.measured


def test_nothing_compiles_while_a_step_is_described(folder, monkeypatch):
    is_waited_for, load, wait = threading.Event(), CompiledSteps._load, BackgroundWarmUp.wait
    monkeypatch.setattr(CompiledSteps, "_load", lambda *args: is_waited_for.wait(PATIENCE) and load(*args))
    monkeypatch.setattr(BackgroundWarmUp, "wait", lambda background: is_waited_for.set() or wait(background))
    with LLM(folder, **OPTIONS | {"warmup": "background"}) as llm:
        assert llm.client.engine.runner.is_warming_up
        inspect.step(llm, context=8, speed=SPEED)
        assert not llm.client.engine.runner.is_warming_up


def test_prompts_have_steps_too(llm):
    step = inspect.step(llm, tokens=16, speed=SPEED)
    assert step.roofline.kv_bytes == 0
    assert step.roofline.flops > inspect.step(llm, rows=1, speed=SPEED, context=8).roofline.flops


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"rows": 5}, "rows"),
        ({"rows": 0}, "rows"),
        ({"tokens": 33}, "tokens"),
        ({"context": 64}, "context"),
        ({"context": 41, "measure": True}, "context"),
        ({"tokens": 8, "measure": True}, "measure"),
    ],
)
def test_a_step_that_the_engine_does_not_have_is_refused(llm, arguments, param):
    with pytest.raises(InvalidRequest) as raised:
        inspect.step(llm, speed=SPEED, **arguments)
    assert raised.value.param == param


def test_a_timeline_has_every_token_of_every_request(llm):
    before = llm.stats()
    prompts = [[7, 8, 9, 10, 11, 12, 13, 14, 15, 3 + number] for number in range(6)]
    with inspect.timeline(llm) as timeline:
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=GREEDY, use_tqdm=False)
    after = llm.stats()
    assert sum(request.num_output_tokens for request in timeline.requests) == sum(
        len(output.outputs[0].token_ids) for output in outputs
    )
    assert timeline.num_preemptions == after.num_preemptions - before.num_preemptions
    assert sum(step.num_tokens for step in timeline.steps) == after.num_step_tokens - before.num_step_tokens
    assert timeline.num_cached_tokens > 0, "the prompts begin alike"
    assert any(step.waiting for step in timeline.steps), "there are more requests than rows"
    for step in timeline.steps:
        assert step.num_held_blocks + step.num_cached_blocks + step.num_free_blocks == llm.info.num_blocks
    recorded = len(timeline.steps)
    llm.generate(prompt_token_ids=[[5, 6]], sampling_params=GREEDY, use_tqdm=False)
    assert len(timeline.steps) == recorded, "it records in its block only"


def test_one_recording_at_a_time(llm):
    with inspect.timeline(llm) as timeline:
        for measurement in (
            inspect.timeline(llm).__enter__,
            lambda: inspect.step(llm, context=8, speed=SPEED, measure=True),
        ):
            with pytest.raises(ConfigError, match="only one runs at a time"):
                measurement()
        llm.generate(prompt_token_ids=[[5, 6]], sampling_params=GREEDY, use_tqdm=False)
    assert timeline.steps
    with inspect.timeline(llm):
        pass


def test_a_timeline_counts_preemptions(folder):
    with (
        LLM(folder, kv_cache_memory=2**14, enable_prefix_caching=False, **OPTIONS) as llm,
        inspect.timeline(llm) as timeline,
    ):
        prompts = [[number] * 6 for number in range(5, 9)]
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        assert timeline.num_preemptions == llm.stats().num_preemptions > 0
    assert "preempted" in timeline.draw().svg


def test_everything_has_a_text_and_a_picture(llm):
    weights, step = inspect.weights(llm), inspect.step(llm, rows=1, context=8, speed=SPEED)
    with inspect.timeline(llm) as timeline:
        llm.generate(prompt_token_ids=[[5, 6]], sampling_params=GREEDY, use_tqdm=False)
    for thing, word in ((weights, "tensor"), (step, "all-reduce"), (step.roofline, "memory-bound")):
        assert word in repr(thing)
        html = thing._repr_html_()
        assert word in html
        assert xml.etree.ElementTree.fromstring(f"<div>{html}</div>") is not None
    assert "1 rows" in repr(step)
    for picture in (weights["qkv"].draw(), step.roofline.draw(), timeline.draw()):
        assert xml.etree.ElementTree.fromstring(picture.svg).tag.endswith("svg")
        assert "nan" not in picture.svg
    assert inspect.timeline(llm).draw().svg, "an empty one is drawn too"


def test_an_engine_in_another_process_is_refused(folder):
    llm = LLM.from_frontend(Frontend(FakeEngineClient(), Tokenizer.load(folder), seed=0))
    with pytest.raises(ConfigError, match="in this process"):
        inspect.weights(llm)


LINES = {
    "%a = f32[16,192]{1,0} all-reduce(%x), replica_groups=mesh['tensor'=4] {'tensor'}, "
    'metadata={op_name="jit(step)/layer_0/jit(run)/mlp/dot_general"}': ("all-reduce", "mlp", 12288, 4, 18432.0),
    "%b = bf16[8,2]{1,0} all-gather(%x), replica_groups=mesh['a'=2,'b'=4] {'a','b'}": (
        *("all-gather", "", 32, 8),
        28.0,
    ),
    "%c = f32[4]{0} reduce-scatter(%x), replica_groups={{0,1},{2,3}}, to_apply=%add": (
        *("reduce-scatter", "", 16, 2),
        16.0,
    ),
    "%d = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8]": ("all-gather", "", 32, 4, 24.0),
    "%e = (f32[2]{0}, s8[8]{0}) all-reduce(%x, %y), replica_groups={{0,1,2,3}}": ("all-reduce", "", 16, 4, 24.0),
    "%e = (f32[2]{0}, s8[8]{0}) all-reduce-start(%x, %y), replica_groups={{0,1,2,3}}": ("all-reduce", "", 16, 4, 24.0),
    "%f = pred[10]{0} collective-permute(%x), source_target_pairs={{0,1}}": ("collective-permute", "", 10, 2, 10.0),
}


@pytest.mark.parametrize("line", LINES)
def test_collectives_are_read_off_hlo(line):
    [found] = find_collectives(f"ENTRY\n  {line}\n  %g = f32[2] fusion(%all-reduce.1), kind=kLoop\n")
    kind, place, num_bytes, group_size, sent = LINES[line]
    assert (found.kind, found.place, found.num_bytes, found.group_size) == (kind, place, num_bytes, group_size)
    assert (found.count, found.sent_bytes) == (1, sent)


@pytest.mark.parametrize(
    ("stages", "num_in_flight", "waiting"),
    [((2, 2), 2, 0), ((2, 2), 1, 1 / 2), ((1, 3), 2, 1 / 3), ((1, 1, 1), 2, 1 / 3), ((1, 2, 1), 3, 1 / 3)],
)
def test_stages_wait_as_a_pipeline_does(stages, num_in_flight, waiting):
    assert simulate(stages, num_in_flight=num_in_flight) == pytest.approx(waiting)


@pytest.mark.slow
def test_stages_of_an_engine(llm):
    with LLM("scribe-2m", pipeline_parallel_size=2, kv_cache_memory=2**20, **OPTIONS) as staged:
        found = inspect.bubble(staged, rows=4, num_tokens=8)
        assert len(found.stage_seconds) == 2
        assert min(*found.stage_seconds, found.plan_seconds) > 0
        assert 0 <= found.simulated <= found.simulated_without_overlap
        assert "4 rows; stages alone: " in repr(found)
        first, last = (inspect.weights(staged, stage=stage) for stage in range(2))
        assert first.total_bytes + last.total_bytes >= staged.info.total_weight_bytes
        assert inspect.kv_cache(staged, stage=1).total_bytes <= staged.info.kv_cache_bytes
        for wrong in (lambda: inspect.weights(staged, stage=2), lambda: inspect.bubble(staged, rows=5)):
            with pytest.raises(InvalidRequest, match=r"(stage|rows) must be between \d and \d, got \d"):
                wrong()
        with pytest.raises(ConfigError, match="bubble times stages"):
            inspect.step(staged, rows=1)
    with pytest.raises(EngineDead, match="the engine is closed"):
        inspect.bubble(staged, rows=2)
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 1"):
        inspect.bubble(llm, rows=2)
