"""Requests whose layers keep a state, of each kind, alone and beside layers that attend."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from depths import quick_only
from engine_harness import Model, Result, assert_naive, drain, request, run, tiny_config
from golden_folder import GOLDENS

from jaxserve.config import EngineConfig
from jaxserve.engine.startup import start_engine
from jaxserve.gpus import GPUS
from jaxserve.layers import delta_rule
from jaxserve.loading.huggingface import load_config
from jaxserve.overview import needs
from jaxserve.planning.sizes import declare, sizes_of
from pallas_kernels.recurrent_chunks import xla

GOLDEN = "qwen3_next_biases"
LAYERS = {
    "beside attention": None,
    "alone": {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2, "mlp_only_layers": [0]},
}


MODELS = {f"delta rule {layers}": (GOLDEN, changes) for layers, changes in LAYERS.items()} | {
    "short convolutions": ("lfm2_biases", None),
    "Mamba-2 side by side with attention": ("falcon_h1_multipliers", None),
}


@pytest.fixture(scope="module", params=quick_only(MODELS, "delta rule beside attention"))
def model(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "CHUNK_SIZE", 4)  # so that rows of a step are several chunks, and begin within one
        patch.setattr(delta_rule, "MAX_ROWS_AT_ONCE", 2)
        golden, changes = MODELS[request.param]
        yield Model(golden, changes=changes, num_kept_states=3)


def jobs(seed, lengths):
    random = np.random.default_rng(seed)
    return {f"r{index}": (random.integers(0, 67, length).tolist(), 9 + index) for index, length in enumerate(lengths)}


def num_cached(results):
    return [result.num_cached_tokens for result in results.values()]


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 2}], ids=["all at once", "two slots"])
def test_tokens_are_those_of_a_full_forward_pass(model, limits):
    """In batches, in chunks, and in slots that others have left."""
    engine = model.engine(max_num_batched_tokens=8, **limits)
    asked = jobs(1, [1, 6, 21, 40, 9, 30])
    assert_naive(model, run(engine, [request(name, *job) for name, job in asked.items()]), asked)


def test_a_preempted_request_begins_again(model):
    engine = model.engine(max_num_batched_tokens=8, max_num_seqs=2, policy="priority")
    asked = jobs(4, [9, 14, 11, 5])
    results = {name: Result() for name in asked}
    engine.add([request(name, *asked[name], priority=1) for name in ("r0", "r1")])
    while len(results["r0"].token_ids) < 3:
        for output in engine.step():
            results[output.request_id].add(output)
    engine.add([request(name, *asked[name], priority=0) for name in ("r2", "r3")])
    assert_naive(model, drain(engine, results), asked)
    assert engine.stats().num_preemptions == 2


def test_prompts_continue_where_states_were_kept(model):
    """At the last full block of a prompt, and where a second one parts from it."""
    [(stem, _), (tail, _), (other, _)] = jobs(2, [30, 9, 11]).values()
    asked = {"whole": (stem, 5), "again": (stem, 7), "parts": (stem[:22] + tail, 5), "there": (stem[:22] + other, 6)}
    engine = model.engine(max_num_batched_tokens=8)
    results = {}
    for name, job in asked.items():
        results |= run(engine, [request(name, *job)])
    assert_naive(model, results, asked)
    assert num_cached(results) == [0, 28, 0, 20]
    evicting = {f"e{index}": job for index, job in enumerate(jobs(5, [17, 18, 19]).values())}
    for name, job in evicting.items():
        run(engine, [request(name, *job)])
    results = run(engine, [request("late", stem, 5)])
    assert_naive(model, results, {"late": (stem, 5)})
    assert num_cached(results) == [0], "its state has made room"


def test_the_next_turn_continues_in_the_answer(model):
    [(prompt, _), (tail, _)] = jobs(6, [30, 9]).values()
    engine = model.engine(max_num_batched_tokens=8)
    [first] = run(engine, [request("first", prompt, 14)]).values()
    asked = {"next": (prompt + first.token_ids + tail, 5)}
    results = run(engine, [request(name, *job) for name, job in asked.items()])
    assert_naive(model, results, asked)
    assert num_cached(results) == [40], "the last full block that was computed"


def test_siblings_continue_behind_the_prompt_of_the_first(model):
    [(prompt, _)] = jobs(2, [30]).values()
    asked = {f"s{index}": (prompt, 5 + index) for index in range(3)}
    engine = model.engine(max_num_batched_tokens=8)
    results = run(engine, [request(name, *job, group_id="s") for name, job in asked.items()])
    assert_naive(model, results, asked)
    assert num_cached(results) == [0, 28, 28]


def test_a_request_that_ends_early_leaves_nothing_behind(model):
    engine = model.engine(max_num_batched_tokens=8, max_num_seqs=1)
    asked = jobs(3, [12, 12])
    engine.add([request("aborted", [5] * 20, 30)])
    for _ in range(6):
        engine.step()
    engine.abort(["aborted"])
    assert_naive(model, run(engine, [request(name, *job) for name, job in asked.items()]), asked)


@pytest.mark.slow
@pytest.mark.parametrize("changes", LAYERS.values(), ids=LAYERS)
def test_an_engine_starts(tmp_path, changes):
    fields = load_config(GOLDENS / GOLDEN) | (changes or {}) | {"eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = tiny_config(tmp_path, load_format="dummy", kv_cache_memory=2**16)
    engine, info = start_engine(config, mesh=None, progress=False)
    try:
        assert info.enable_prefix_caching
        assert [kind.num_layers for kind in info.kv_kinds] == ([] if changes else [1])
        assert len(run(engine, [request("one", [3, 4, 5], 4)])["one"].token_ids) == 4
        held = {name: sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for name, tree in engine.runner.state.items()}
    finally:
        engine.runner.close()
    absent = declare(dataclasses.replace(config, dtype="float32", kernels="xla"), GPUS["h200"], to_compile=False)
    sizes = sizes_of(absent)
    assert sizes.weight_bytes == held["params"]
    assert sizes.state_bytes > 0
    assert sizes.kv_bytes + sizes.state_bytes == held["kv_cache"] + held["kept_states"]
    assert sizes.slot_bytes == held["slots"]
    assert info.kv_cache_bytes + info.state_bytes * config.max_num_seqs == held["kv_cache"]
    found = needs(EngineConfig(model=str(tmp_path)), memory=2**30)
    assert "2 with a state" in found.layers
    assert "a state of 6 matrices 7 x 9 in float32" in found.layers
    assert found.max_batch > 0
