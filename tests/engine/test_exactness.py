"""Whatever the engine does to be fast, greedy tokens equal those of a full forward pass without a cache."""

import jax
import numpy as np
import pytest
from depths import quick_first, quick_only
from engine_harness import GREEDY, MAX_MODEL_LEN, Model, Result, assert_naive, drain, prompts, request, run
from few_sizes import every_size

from jaxserve.execution import runner, slots
from jaxserve.execution.programs.spec import ON_CPU, ON_GPU
from jaxserve.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def llama():
    return Model("llama_tied_llama3_rope")


@pytest.fixture(scope="module")
def llama_of_every_size():
    with every_size():
        return Model("llama_tied_llama3_rope")


@pytest.mark.parametrize(
    ("budget", "overlap"),
    quick_only([(budget, overlap) for budget in (32, 7, 1) for overlap in (True, False)], (32, True), (7, False)),
)
def test_mixed_lengths_in_chunks(llama, budget, overlap):
    lengths = [1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 47, 64, 70]
    asked = {f"r{i}": (prompt, 3 + i) for i, prompt in enumerate(prompts(llama, lengths))}
    engine = llama.engine(overlap=overlap, max_num_batched_tokens=budget)
    results = run(engine, [request(name, *job) for name, job in asked.items()])
    assert_naive(llama, results, asked)
    assert engine.stats().num_running == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33])
def test_every_bucket_boundary(llama_of_every_size, num_tokens):
    """Steps of one token less than a bucket, exactly as many, and one more: as one prompt, and as that many rows."""
    llama = llama_of_every_size
    assert [bucket.num_tokens for bucket in llama.runner.model.buckets] == [1, 4, 8, 16, 32]
    (prompt,) = prompts(llama, [num_tokens], seed=num_tokens)
    asked = {"one": (prompt, 4)}
    assert_naive(llama, run(llama.engine(), [request("one", *asked["one"])]), asked)
    asked = {
        f"r{i}": (prompt, 4) for i, prompt in enumerate(prompts(llama, [1] * min(num_tokens, 8), seed=num_tokens + 1))
    }
    assert_naive(llama, run(llama.engine(), [request(name, *job) for name, job in asked.items()]), asked)


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_sequences_that_end_at_block_and_context_borders(llama, offset):
    block_size = llama.runner.block_size
    lengths = [block_size + offset, 5 * block_size + offset]
    asked = {f"r{i}": (prompt, 2 * block_size) for i, prompt in enumerate(prompts(llama, lengths, seed=3))}
    (prompt,) = prompts(llama, [MAX_MODEL_LEN - 10 + min(offset, 0)], seed=4)
    asked["full"] = (prompt, 10)
    assert_naive(llama, run(llama.engine(), [request(name, *job) for name, job in asked.items()]), asked)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", quick_first(["priority", "fcfs"]))
def test_preemption(llama, overlap, policy):
    """A pool for about three of the eight requests that run: the others are thrown out and recomputed."""
    engine = llama.engine(overlap=overlap, num_blocks=30, policy=policy)
    asked = {f"r{i}": (prompt, 30 + i) for i, prompt in enumerate(prompts(llama, [9, 14, 20, 5, 31, 12, 7, 3], seed=5))}
    requests = [request(name, *job, priority=i % 3) for i, (name, job) in enumerate(asked.items())]
    assert_naive(llama, run(engine, requests), asked)
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_prefix_hits(llama, overlap):
    engine = llama.engine(overlap=overlap)
    (common,) = prompts(llama, [40], seed=6)
    tails = prompts(llama, [1, 2, 4, 9, 17], seed=7)
    asked = {f"first{i}": (common + tail, 6) for i, tail in enumerate(tails)}  # prefixes of the same step
    assert_naive(llama, run(engine, [request(name, *job) for name, job in asked.items()]), asked)
    asked = {f"then{i}": (common[: 36 + i] + tail, 9) for i, tail in enumerate(tails)} | {"same": (common, 5)}
    results = run(engine, [request(name, *job) for name, job in asked.items()])
    assert_naive(llama, results, asked)
    assert results["same"].num_cached_tokens == 36  # never the last token, and whole blocks only
    assert engine.stats().prefix_cache_hits > 0
    no_cache = llama.engine(overlap=overlap, enable_prefix_caching=False)
    for _ in range(2):
        results = run(no_cache, [request("same", *asked["same"])])
        assert results["same"].num_cached_tokens == 0


def test_a_generated_prefix_is_hit_in_the_next_turn(llama):
    engine = llama.engine()
    (prompt,) = prompts(llama, [11], seed=8)
    first = run(engine, [request("turn1", prompt, 14)])["turn1"]
    longer = prompt + first.token_ids + [5, 6, 7]
    asked = {"turn2": (longer, 8)}
    results = run(engine, [request("turn2", *asked["turn2"])])
    assert_naive(llama, results, asked)
    assert results["turn2"].num_cached_tokens >= 20


def test_salts_do_not_share(llama):
    engine = llama.engine()
    (prompt,) = prompts(llama, [24], seed=9)
    run(engine, [request("mine", prompt, 2, cache_salt="a")])
    assert run(engine, [request("other", prompt, 2, cache_salt="b")])["other"].num_cached_tokens == 0
    assert run(engine, [request("again", prompt, 2, cache_salt="a")])["again"].num_cached_tokens == 20


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_siblings_share_their_prompt(llama, enable_prefix_caching):
    engine = llama.engine(enable_prefix_caching=enable_prefix_caching)
    (prompt,) = prompts(llama, [37], seed=10)
    requests = [request(f"s{i}", prompt, 7, group_id="s0") for i in range(5)]
    engine.add(requests)
    results = {r.request_id: Result() for r in requests}
    most_blocks = 0
    while engine.has_work:
        for output in engine.step():
            results[output.request_id].add(output)
        stats = engine.stats()
        most_blocks = max(most_blocks, stats.kv_positions_allocated // llama.runner.block_size)
    assert_naive(llama, results, {f"s{i}": (prompt, 7) for i in range(5)})
    assert most_blocks <= 9 + 5 * 2  # nine full prompt blocks once, the rest of each sequence separately
    assert sum(result.num_cached_tokens for result in results.values()) == 4 * 36


@pytest.mark.parametrize("overlap", [True, False])
def test_aborts_leave_the_others_alone(llama, overlap):
    engine = llama.engine(overlap=overlap, num_blocks=40)
    asked = {f"r{i}": (prompt, 12) for i, prompt in enumerate(prompts(llama, [10] * 12, seed=11))}
    engine.add([request(name, *job) for name, job in asked.items()])
    results = {name: Result() for name in asked}
    aborted = set()
    for step in range(10):
        for output in engine.step():
            results[output.request_id].add(output)
        if step < 5:
            name = f"r{2 * step + 1}"
            engine.abort([name, "unknown"])
            aborted.add(name)
        engine.scheduler.check_integrity()
    results = drain(engine, results)
    survivors = {name: job for name, job in asked.items() if name not in aborted}
    assert_naive(llama, {name: results[name] for name in survivors}, survivors)
    assert engine.stats().kv_positions_allocated == 0


def test_static_scheduler(llama):
    engine = llama.engine(kind="static")
    lengths = [3, 17, 30, 1, 9, 22, 5, 12, 8, 40]
    asked = {f"r{i}": (prompt, 4 + 2 * i) for i, prompt in enumerate(prompts(llama, lengths, seed=12))}
    assert_naive(llama, run(engine, [request(name, *job) for name, job in asked.items()]), asked)


@pytest.mark.parametrize("name", quick_only(["qwen3_biases_window", "gemma2_caps", "llama_untied"], "llama_untied"))
def test_every_family(name):
    # Chunks of at most 16 tokens: fewer shapes to compile. One family takes the steps without a sampler, as on a GPU.
    model = Model(name, traits=ON_GPU if name == "llama_untied" else ON_CPU)
    asked = {f"r{i}": (prompt, 9) for i, prompt in enumerate(prompts(model, [1, 6, 21, 40], seed=13))}
    requests = [request(name, *job) for name, job in asked.items()]
    assert_naive(model, run(model.engine(num_blocks=40, max_num_batched_tokens=16), requests), asked)


@pytest.mark.slow
def test_more_new_requests_than_a_forward_pass_takes_along(monkeypatch):
    """A forward pass on a GPU admits at most ADMISSION_ROWS requests; some of these have parameters of their own."""
    for module in (slots, runner):
        monkeypatch.setattr(module, "ADMISSION_ROWS", 3)
    model = Model("llama_untied", traits=ON_GPU)
    asked = {
        f"r{i}": (prompt, 6) for i, prompt in enumerate(prompts(model, [2, 9, 5, 13, 3, 7, 11, 6, 4, 10, 8], seed=18))
    }
    params = [SamplingParams(temperature=0.0, logit_bias={7: 100.0} if i % 3 == 0 else None) for i in range(11)]
    requests = [request(name, *job, params[i]) for i, (name, job) in enumerate(asked.items())]
    results = run(model.engine(num_blocks=60), requests)
    for name in list(asked)[::3]:
        assert results.pop(name).token_ids == [7] * 6
        del asked[name]
    assert_naive(model, results, asked)


@pytest.mark.slow
def test_forward_passes_without_new_requests_upload_no_admissions(monkeypatch):
    model = Model("llama_untied", traits=ON_GPU)
    packed = []
    pack = slots.pack_admissions
    monkeypatch.setattr(runner, "pack_admissions", lambda rows, **sizes: packed.append(1) or pack(rows, **sizes))
    asked = {f"r{i}": (prompt, 4) for i, prompt in enumerate(prompts(model, [60, 50], seed=20))}
    engine = model.engine(max_num_batched_tokens=16)
    assert_naive(model, run(engine, [request(name, *job) for name, job in asked.items()]), asked)
    assert engine.stats().num_steps > 7
    assert len(packed) == 2  # one for each prompt


@pytest.mark.slow
def test_requests_that_decode_steps_admit():
    """Requests of which only the last prompt token is not cached: on a GPU their forward passes admit no request."""
    model = Model("llama_untied", traits=ON_GPU)
    engine = model.engine()
    common, *last = prompts(model, [24, 1, 1, 1, 1], seed=19)
    run(engine, [request("first", common, 1)])
    for num_cached, params in [(0, GREEDY), (24, GREEDY), (24, SamplingParams(temperature=0.0, logprobs=2))]:
        asked = {f"r{i}": (common[:num_cached] + token, 6) for i, token in enumerate(last)}
        results = run(engine, [request(name, *job, params) for name, job in asked.items()])
        assert_naive(model, results, asked)
        assert all(result.num_cached_tokens == num_cached for result in results.values())


@pytest.mark.slow
def test_tensor_parallel_equals_one_device():
    model = Model("llama_biases_linear_rope", tensor_parallel_size=2)
    asked = {f"r{i}": (prompt, 12) for i, prompt in enumerate(prompts(model, [1, 6, 21, 40], seed=14))}
    requests = [request(name, *job) for name, job in asked.items()]
    assert_naive(Model("llama_biases_linear_rope"), run(model.engine(num_blocks=40), requests), asked)


@pytest.mark.slow
def test_latents_on_two_devices():
    """Chunks, prefix hits and preemption, where both devices keep one K for all heads and V is a part of it."""
    one_device, model = (Model("deepseek_v3_groups", tensor_parallel_size=size) for size in (1, 2))
    engine = model.engine(num_blocks=20, max_num_batched_tokens=4)  # two shapes to compile
    asked = {f"r{i}": (prompt, 28) for i, prompt in enumerate(prompts(model, [1, 6, 9, 32], seed=17))}
    results = run(engine, [request(name, *job) for name, job in asked.items()])
    assert engine.stats().num_preemptions > 0
    asked["again"] = (asked["r3"][0] + [1, 2, 3], 5)
    results |= run(engine, [request("again", *asked["again"])])
    assert results["again"].num_cached_tokens == 32
    with jax.set_mesh(one_device.runner.mesh):
        assert_naive(one_device, results, asked)


def test_stop_tokens_end_a_request(llama):
    (prompt,) = prompts(llama, [13], seed=15)
    text = llama.naive(prompt, 20)
    stop = text[6]
    first = text.index(stop)
    for overlap in (True, False):
        result = run(llama.engine(overlap=overlap), [request("r", prompt, 20, stop_token_ids=frozenset([stop]))])["r"]
        assert (result.token_ids, result.finish_reason, result.stop_reason) == (text[: first + 1], "stop", stop)
    params = SamplingParams(temperature=0.0, min_tokens=first + 3, max_tokens=20)
    result = run(llama.engine(), [request("r", prompt, 20, params, stop_token_ids=frozenset([stop]))])["r"]
    assert stop not in result.token_ids[: first + 2]
    assert len(result.token_ids) > first + 2


@pytest.mark.parametrize("seed", quick_first(range(3)))
def test_random_traffic(llama, seed):
    """Arrivals, aborts, shared prefixes, priorities and a small pool at the same time."""
    random = np.random.default_rng(seed)
    engine = llama.engine(
        overlap=bool(seed % 2), num_blocks=int(random.integers(26, 60)), policy="priority", max_num_batched_tokens=19
    )
    stems = prompts(llama, [12, 20, 33], seed=16)
    asked, results = {}, {}
    for step in range(150):
        if step < 60 and random.random() < 0.5:
            name = f"r{step}"
            stem = stems[random.integers(3)]
            tail = random.integers(0, llama.vocab_size, int(random.integers(1, 8))).tolist()
            asked[name] = (stem[: int(random.integers(1, len(stem) + 1))] + tail, int(random.integers(1, 25)))
            engine.add([request(name, *asked[name], priority=int(random.integers(3)))])
            results[name] = Result()
        if asked and random.random() < 0.1:
            name = list(asked)[random.integers(len(asked))]
            if results[name].finish_reason is None:
                engine.abort([name])
                del asked[name]
        for output in engine.step() if engine.has_work else []:
            results[output.request_id].add(output)
        engine.scheduler.check_integrity()
    drain(engine, results)
    assert_naive(llama, results, asked)
