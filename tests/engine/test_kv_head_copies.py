"""More devices than KV heads, from checkpoints and stores to tokens: as one device, and with memory as counted."""

import json

import jax
import numpy as np
import pytest
import quantized_models
from depths import quick_first
from engine_harness import request, run, tiny_config
from quantized_models import specs_of, write_random

from jaxserve.convert import convert
from jaxserve.engine.startup import start_engine
from jaxserve.errors import ConfigError
from jaxserve.layers.layouts import abstract_params
from jaxserve.loading.weights import load_weights

FIELDS = quantized_models.FIELDS | {"hidden_size": 32, "intermediate_size": 48}
MODELS = {
    "llama": {"num_key_value_heads": 2, "attention_bias": True},
    "gemma": {"num_key_value_heads": 1},
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
    },
}
FLOAT32 = np.dtype(np.float32)


@pytest.fixture(scope="module", params=quick_first(MODELS))
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    write_random(path, FIELDS | MODELS[request.param] | {"model_type": request.param})
    return path


@pytest.fixture(scope="module")
def store(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("stores") / checkpoint.name
    convert(str(checkpoint), path, progress=False)
    return path


def start(path, num_devices):
    config = tiny_config(path, max_model_len=None, tensor_parallel_size=num_devices, max_num_batched_tokens=4)
    return start_engine(config, mesh=None, progress=False)


def greedy_tokens(path, num_devices):
    """Return the tokens of three requests in chunks in parallel, then of one that shares a prefix with the longest."""
    engine, _ = start(path, num_devices)
    prompts = [np.random.default_rng(length).integers(0, 96, length).tolist() for length in (1, 5, 21)]
    results = run(engine, [request(f"r{index}", prompt, 12) for index, prompt in enumerate(prompts)])
    results |= run(engine, [request("again", [*prompts[-1], 7], 6)])
    assert results["again"].num_cached_tokens == 20
    engine.close()
    return {name: result.token_ids for name, result in results.items()}


@pytest.mark.slow
def test_tokens_of_one_device(checkpoint, store):
    expected = greedy_tokens(checkpoint, 1)
    assert len(set().union(*expected.values())) > 5
    assert greedy_tokens(checkpoint, 4) == expected
    assert greedy_tokens(store, 8) == expected


@pytest.mark.parametrize("num_devices", [4, 8])
def test_a_store_gives_the_weights_of_its_checkpoint(checkpoint, store, num_devices):
    mesh = jax.make_mesh((num_devices,), ("tensor",), devices=jax.devices()[:num_devices])
    abstract = abstract_params(specs_of(checkpoint), dtype=FLOAT32, mesh=mesh)
    loaded = [
        load_weights(path, specs_of(path), dtype=FLOAT32, mesh=mesh, progress=False) for path in (checkpoint, store)
    ]
    jax.tree.map(np.testing.assert_array_equal, *loaded)
    for params in loaded:
        for array, expected in zip(jax.tree.leaves(params), jax.tree.leaves(abstract), strict=True):
            assert (array.shape, array.dtype, array.sharding) == (expected.shape, expected.dtype, expected.sharding)
    heads = loaded[0]["layers"][0]["attention"]["qkv"].values
    assert heads.addressable_shards[0].data.shape == (1, 8 // num_devices + 2, 8, 32)


def test_memory_of_the_cache_is_what_is_counted(checkpoint):
    engine, info = start(checkpoint, 8)
    runner = engine.runner
    pools = jax.tree.leaves(runner.state["kv_cache"])
    shards = [shard.data for pool in pools for shard in pool.addressable_shards]
    assert {shard.shape for shard in shards} == {(info.num_blocks, 1, 4, 8)}
    assert sum(shard.nbytes for shard in shards) == runner.bytes_per_block * info.num_blocks <= 2**20
    assert [kind.bytes_per_token for kind in info.kv_kinds] == [8 * 2 * 2 * 8 * 4]  # devices, layers, K and V
    engine.close()


def test_heads_that_do_not_divide_are_refused(tmp_path):
    fields = FIELDS | {"model_type": "llama", "num_attention_heads": 12, "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    message = "kv_heads of size 3 can be neither split nor repeated evenly over 4 devices .*tensor_parallel_size"
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, 4)
