"""Keys and values in 8 bits: a request has the same tokens in whatever way the engine batches it."""

import dataclasses

import numpy as np
import pytest
from depths import quick_first
from engine_harness import Model, request, run, tiny_config
from golden_folder import with_tensors
from test_exactness import prompts

from jaxserve.engine.report import kv_kinds
from jaxserve.engine.startup import start_engine
from jaxserve.gpus import GPUS
from jaxserve.planning.sizes import declare

NAME = "llama_biases_linear_rope"
LAST_SCALE = "model.layers.1.self_attn.v_scale"
LENGTHS = [9, 14, 20, 5, 31, 12, 7, 3]


@pytest.fixture(scope="module", params=quick_first(["fp8", "int8"]))
def kv_cache_dtype(request):
    return request.param


@pytest.fixture(scope="module")
def llama(kv_cache_dtype):
    return Model(NAME, kv_cache_dtype=kv_cache_dtype)


@pytest.fixture(scope="module")
def alone(llama):
    """Requests, each with the tokens that it has when it is served alone and its prompt is one chunk."""
    asked = {f"r{i}": (prompt, 12 + i) for i, prompt in enumerate(prompts(llama, LENGTHS, seed=5))}
    (common,) = prompts(llama, [24], seed=6)
    asked |= {f"t{i}": (common + tail, 6) for i, tail in enumerate(prompts(llama, [1, 2, 4, 8], seed=7))}
    return {
        name: (*job, run(llama.engine(enable_prefix_caching=False), [request(name, *job)])[name].token_ids)
        for name, job in asked.items()
    }


def tokens_of(engine, asked, **fields):
    results = run(engine, [request(name, prompt, count, **fields) for name, (prompt, count, _) in asked.items()])
    return {name: result.token_ids for name, result in results.items()}


def only_tokens(asked):
    return {name: tokens for name, (*_, tokens) in asked.items()}


@pytest.mark.parametrize("budget", [32, 7])
def test_chunks(llama, alone, budget):
    assert tokens_of(llama.engine(max_num_batched_tokens=budget), alone) == only_tokens(alone)


def test_preemption(llama, alone):
    engine = llama.engine(num_blocks=30)
    assert tokens_of(engine, alone) == only_tokens(alone)
    assert engine.stats().num_preemptions > 0


def test_prefix_hits(llama, alone):
    engine = llama.engine()
    for _ in range(2):
        assert tokens_of(engine, alone) == only_tokens(alone)
    assert engine.stats().prefix_cache_hits > 0


def test_heads_on_two_devices(kv_cache_dtype, alone):
    two = Model(NAME, kv_cache_dtype=kv_cache_dtype, tensor_parallel_size=2)
    assert tokens_of(two.engine(max_num_batched_tokens=8), alone) == only_tokens(alone)


def test_blocks_are_counted_with_their_scales(llama):
    """A vector of 8 bits and a float32 scale, for keys and for values."""
    specs = llama.family.kv_specs(llama.config)
    (kind,) = kv_kinds(llama.runner.builder)
    assert kind.bytes_per_token == sum(2 * spec.num_kv_heads * (spec.head_dim + 4) for spec in specs)


def test_static_scales_of_a_checkpoint(tmp_path):
    """Its second layer brings scales, a key's and a value's for each of two heads; the first one has its own. What is
    planned and compiled ahead knows them too.
    """
    of_keys, of_values = np.float32([0.002, 0.003]), np.float32([0.001, 0.004])
    path = with_tensors(tmp_path, {"model.layers.1.self_attn.k_scale": of_keys, LAST_SCALE: of_values})
    config = tiny_config(
        path,
        kv_cache_dtype="fp8",
        kv_cache_memory=2**16,
        max_model_len=32,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        tensor_parallel_size=2,
    )
    engine, _ = start_engine(config, mesh=None, progress=False)
    assert len(run(engine, [request("r", [1, 2, 3, 4, 5], 2)])["r"].token_ids) == 2
    computed, static = (np.asarray(pool.scales) for pool in engine.runner.state["kv_cache"].pools)
    engine.close()
    absent = declare(dataclasses.replace(config, dtype="float32", kernels="xla"), GPUS["h200"], to_compile=False)
    assert absent.plan.builder.spec.kv_scales == engine.runner.builder.spec.kv_scales
    is_written = static[:, 0, 0] > 0
    assert is_written.sum() > 5
    assert len(set(computed[:, 0, 0].ravel().tolist())) > 5
    for kind, want in enumerate([of_keys, of_values]):
        for head in range(2):
            assert set(static[:, head, kind][is_written].tolist()) == {float(want[head])}


@pytest.mark.parametrize("name", quick_first(["deepseek_v3_groups", "gemma2_caps", "gpt_oss_clamped"]))
def test_latents_windows_caps_and_sinks(name):
    model = Model(name, kv_cache_dtype="fp8")
    asked = {f"r{i}": (prompt, 8, None) for i, prompt in enumerate(prompts(model, [40, 9, 23], seed=8))}
    alone = {}
    for one in asked.items():
        alone |= tokens_of(model.engine(enable_prefix_caching=False), dict([one]))
    assert tokens_of(model.engine(max_num_batched_tokens=7), asked) == alone
