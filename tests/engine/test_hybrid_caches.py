"""Layers with windows next to layers without: blocks out of the windows are given back, and tokens are those computed
without a cache.
"""

import numpy as np
import pytest
from depths import quick_first
from engine_harness import Model, Result, assert_naive, corrupted, drain, prompts, request, run

from jaxserve.errors import CapacityExceeded

WINDOW = 7


class Hybrid(Model):
    """With steps of at most 8 tokens: fewer shapes to compile."""

    def engine(self, **options):
        return super().engine(**{"max_num_batched_tokens": 8} | options)


@pytest.fixture(scope="module")
def gemma():
    """Two layers of each kind, in two KV groups that use the same two pools."""
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    changes = {"num_hidden_layers": 4, "layer_types": kinds, "tie_word_embeddings": False}
    model = Hybrid("gemma3_two_thetas", changes=changes)
    assert model.runner.layout.windows == (WINDOW, None)
    assert model.runner.layout.pool_of_layer == (0, 0, 1, 1)
    return model


def run_jobs(engine, asked):
    return run(engine, [request(name, *job) for name, job in asked.items()])


@pytest.mark.slow
@pytest.mark.parametrize("overlap", quick_first([True, False]))
def test_chunks_and_preemption(gemma, overlap):
    engine = gemma.engine(overlap=overlap, num_blocks=26)
    asked = {f"r{i}": (prompt, 12 + i) for i, prompt in enumerate(prompts(gemma, [1, 6, 21, 40, 60, 9, 30], seed=1))}
    assert_naive(gemma, run_jobs(engine, asked), asked)
    assert engine.stats().num_preemptions > 0
    assert engine.stats().kv_bytes_held == {"full": 0, f"window of {WINDOW}": 0}


@pytest.mark.parametrize("overlap", quick_first([True, False]))
def test_hits(gemma, overlap):
    """At the end of what has been computed, and in the middle, although the window has moved on."""
    engine = gemma.engine(overlap=overlap)
    (text,) = prompts(gemma, [70], seed=2)
    text += run_jobs(engine, {"long": (text, 7)})["long"].token_ids
    asked = {"next turn": ([*text, 1, 2], 8), "middle": ([*text[:41], 3], 8), "same": (text, 2)}
    results = run_jobs(engine, asked)
    assert_naive(gemma, results, asked)
    assert [results[name].num_cached_tokens for name in asked] == [76, 40, 76]


def test_siblings_share_their_prompt(gemma):
    engine = gemma.engine(enable_prefix_caching=False)
    (prompt,) = prompts(gemma, [37], seed=3)
    results = run(engine, [request(f"s{i}", prompt, 9, group_id="s0") for i in range(4)])
    assert_naive(gemma, results, {f"s{i}": (prompt, 9) for i in range(4)})
    assert sum(result.num_cached_tokens for result in results.values()) == 3 * 36


def test_a_long_request_holds_no_more_of_a_window_than_its_width(gemma):
    engine = gemma.engine()
    bytes_per_block, block_size = gemma.runner.bytes_per_block, gemma.runner.block_size
    (prompt,) = prompts(gemma, [40], seed=4)
    engine.add([request("long", prompt, 50)])
    held = []
    while engine.has_work:
        engine.step()
        held.append(engine.stats().kv_bytes_held)
    full = [one["full"] // bytes_per_block for one in held]
    local = [one[f"window of {WINDOW}"] // bytes_per_block for one in held]
    assert max(full) == -(-89 // block_size)
    assert max(local) <= (WINDOW - 1 + 8) // block_size + 2  # while it computes its prompt, 8 tokens at a time
    assert max(local[20:]) <= (WINDOW - 1) // block_size + 2


def test_a_pool_too_small_for_full_attention_serves(gemma):
    (prompt,) = prompts(gemma, [60], seed=5)
    asked = {"long": (prompt, 30)}
    assert_naive(gemma, run_jobs(gemma.engine(num_blocks=28), asked), asked)
    with pytest.raises(CapacityExceeded):
        gemma.engine(num_blocks=28, windows=(None, None)).add([request("long", *asked["long"])])


def test_static_scheduler(gemma):
    engine = gemma.engine(kind="static", num_blocks=60)
    asked = {f"r{i}": (prompt, 5 + 4 * i) for i, prompt in enumerate(prompts(gemma, [3, 17, 50, 1, 9], seed=6))}
    assert_naive(gemma, run_jobs(engine, asked), asked)


def test_what_others_write_into_blocks_that_were_given_back_is_not_seen(gemma, monkeypatch):
    """One request runs on while the other fills all the blocks that it has given back with NaN."""
    (prompt,) = prompts(gemma, [30], seed=7)
    tokens = gemma.naive(prompt, 40)
    corrupt = next(token for token in range(gemma.vocab_size) if token not in prompt + tokens)
    monkeypatch.setitem(gemma.params, "embed", corrupted(gemma.params["embed"], corrupt))
    engine = gemma.engine(num_blocks=32)
    engine.add([request("clean", prompt, 40)])
    results = {"clean": Result()}
    for step in range(30):
        if step > 8:
            results[f"corrupt{step}"] = Result()
            engine.add([request(f"corrupt{step}", [corrupt] * 20, 3)])
        for output in engine.step():
            results[output.request_id].add(output)
    (running,) = (one for one in engine.scheduler._running if one.request_id == "clean")
    tables = gemma.runner.state["slots"].block_tables  # as the device has them
    given_back = tables[0, running.slot, : running.first_blocks[0]]
    assert np.isnan(gemma.runner.state["kv_cache"].pools[0].v[given_back]).any()
    drain(engine, results)
    assert results.pop("clean").token_ids == tokens
    assert all(result.finish_reason == "error" for result in results.values())
    gemma.runner.allocate()


@pytest.mark.parametrize(
    ("name", "num_blocks"),
    quick_first([("gemma4_shared", 26), ("gemma3n_shared", 20), ("llama4_chunks", 36), ("gpt_oss_clamped", 20)]),
)
def test_layers_that_read_what_others_keep_or_see_chunks(name, num_blocks):
    """In chunks, after preemptions, and from a cached prefix."""
    model = Hybrid(name)
    engine = model.engine(num_blocks=num_blocks)
    asked = {f"r{i}": (prompt, 12) for i, prompt in enumerate(prompts(model, [21, 40, 30, 6], seed=9))}
    assert_naive(model, run_jobs(engine, asked), asked)
    assert engine.stats().num_preemptions > 0
    engine, (text, _) = model.engine(), asked["r1"]
    asked = {"next turn": ([*text, 1], 3)}
    run_jobs(engine, {"first turn": (text, 1)})
    results = run_jobs(engine, asked)
    assert_naive(model, results, asked)
    assert results["next turn"].num_cached_tokens == 40


@pytest.mark.slow
def test_two_devices():
    """Block tables are whole on every device, along all axes of the mesh."""
    one_device, model = (Model("gemma2_caps", tensor_parallel_size=size) for size in (1, 2))
    asked = {f"r{i}": (prompt, 10) for i, prompt in enumerate(prompts(model, [20, 12], seed=8))}
    engine = model.engine(num_blocks=20, max_num_batched_tokens=1)  # one shape to compile
    assert_naive(one_device, run_jobs(engine, asked), asked)
