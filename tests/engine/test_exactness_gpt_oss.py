"""GPT-OSS through the engine: experts, sinks and windows on every other layer, under all that moves requests about."""

import jax
import numpy as np
import pytest
from engine_harness import Model, request, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gpt_oss():
    return Model("gpt_oss_clamped")


def assert_naive(model, results, asked):
    for name, (prompt, max_tokens) in asked.items():
        with jax.set_mesh(model.runner.mesh):  # experts run in an island
            assert results[name].token_ids == model.naive(prompt, max_tokens), (name, results[name].error)


def test_chunks_and_preemption(gpt_oss):
    random = np.random.default_rng(0)
    lengths = [1, 6, 21, 40, 13, 30]
    asked = {f"r{i}": (random.integers(0, gpt_oss.vocab_size, size).tolist(), 20) for i, size in enumerate(lengths)}
    engine = gpt_oss.engine(num_blocks=40, max_num_batched_tokens=16)
    assert_naive(gpt_oss, run(engine, [request(name, *job) for name, job in asked.items()]), asked)
    assert engine.stats().num_preemptions > 0


def test_prefix_hits(gpt_oss):
    random = np.random.default_rng(1)
    common = random.integers(0, gpt_oss.vocab_size, 40).tolist()
    engine = gpt_oss.engine(max_num_batched_tokens=16)
    asked = {"first": (common, 9)}
    assert_naive(gpt_oss, run(engine, [request("first", *asked["first"])]), asked)
    tails = {f"tail{i}": random.integers(0, gpt_oss.vocab_size, 1 + 5 * i).tolist() for i in range(3)}
    asked = {name: (common + tail, 7) for name, tail in tails.items()}
    results = run(engine, [request(name, *job) for name, job in asked.items()])
    assert_naive(gpt_oss, results, asked)
    assert [result.num_cached_tokens for result in results.values()] == [40] * 3
