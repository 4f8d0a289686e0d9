"""Keys and values that are rounded apart: both together are what an engine has with a KV cache in 8 bits."""

import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from engine_harness import request, run

from jaxserve.bench.shapes import SMALL_SHAPES, write_config
from jaxserve.config import EngineConfig
from jaxserve.engine.startup import start_engine
from jaxserve.inspect.kv_rounding import Rounding, _Rounder, moved_logprobs
from jaxserve.sampling_params import SamplingParams

NUM_TOKENS = 60  # more than the windows of 40


@pytest.fixture
def tokens():
    return np.random.default_rng(0).integers(0, 1000, NUM_TOKENS).tolist()


@pytest.fixture(params=quick_first(["window", "latents", "sinks", "caps-and-windows", "heads-of-two-sizes", "mamba"]))
def config(request, tmp_path):
    fields = SMALL_SHAPES[request.param] | {"num_hidden_layers": 4, "max_position_embeddings": 64}
    if request.param == "window":  # its layers are alike
        fields["num_hidden_layers"] = 2
    path: pathlib.Path = write_config(tmp_path, fields)
    sizes = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 64, "kv_cache_memory": 2**24}
    return EngineConfig(model=str(path), load_format="dummy", dtype="float32", kernels="xla", warmup="none", **sizes)


def prompt_logprobs(config, tokens):
    """Return the log probabilities of a prompt's tokens, but of its first one, by an engine."""
    engine, _ = start_engine(config, mesh=None, progress=False)
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    entries = run(engine, [request("r", tokens, 1, params)], check=False)["r"].prompt_logprobs
    engine.close()
    return np.array([entry.logprob for entry in entries])


@pytest.mark.parametrize("dtype", quick_first(["fp8", "int8"]))
def test_both_rounded_are_a_cache_in_8_bits(config, tokens, dtype):
    plain, held = (
        prompt_logprobs(dataclasses.replace(config, kv_cache_dtype=each), tokens) for each in ("auto", dtype)
    )
    engine, _ = start_engine(config, mesh=None, progress=False)
    of_keys, of_values, both, planted = moved_logprobs(
        engine.runner,
        [tokens],
        [Rounding(keys=True), Rounding(values=True), Rounding(keys=True, values=True), Rounding(outlier=64.0)],
        dtype=dtype,
    )
    engine.close()
    size = np.abs(held - plain).mean()
    assert size > 1e-4
    np.testing.assert_allclose(both, held - plain, atol=0.05 * size)
    assert np.abs(of_keys - both).mean() > 0.1 * size
    assert np.abs(of_values - both).mean() > 0.01 * size
    assert not planted.any()


@pytest.mark.parametrize("is_static", [False, True])
def test_scales_of_tokens_and_heads_or_of_a_layer(is_static):
    """The error of an integer is half a step at most, and some have nearly that."""
    x = np.random.default_rng(1).normal(size=(50, 2, 64)).astype(np.float32) * np.float32([[[1.0], [8.0]]])
    held, untouched = _Rounder(Rounding(keys=True, is_static=is_static), jnp.int8).held(jnp.asarray(x), jnp.asarray(x))
    np.testing.assert_array_equal(untouched, x)
    step = np.abs(x).max(axis=None if is_static else -1, keepdims=True) / 127
    errors = np.abs(np.asarray(held) - x) / step
    assert 0.49 < errors.max() < 0.501
