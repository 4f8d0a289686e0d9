"""`--quantization`, from a checkpoint of floats to tokens: those of a full forward pass with the rounded values."""

import json

import jax
import numpy as np
import pytest
from depths import quick_first
from quantized_models import FIELDS, greedy_tokens, naive_tokens, prompt_logprobs, specs_of, write_random
from safetensors.numpy import save_file

from jaxserve.convert import convert
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.layers.layouts import schemes_of
from jaxserve.loading.huggingface import source_shapes
from jaxserve.loading.store_manifest import read_manifest
from jaxserve.loading.weights import load_weights, stored_specs

MODELS = {
    "int8": {"model_type": "qwen2"},
    "int4": {"model_type": "llama", "attention_bias": True, "num_key_value_heads": 2},
    "fp8": {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
FLOAT32 = np.dtype(np.float32)


@pytest.fixture(scope="module", params=quick_first(MODELS))
def quantization(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(quantization, tmp_path_factory):
    path = tmp_path_factory.mktemp(quantization)
    write_random(path, FIELDS | MODELS[quantization])
    return path


@pytest.fixture(scope="module")
def store(checkpoint, quantization, tmp_path_factory):
    path = tmp_path_factory.mktemp("stores") / quantization
    convert(str(checkpoint), path, quantization=quantization, progress=False)
    return path


@pytest.fixture(scope="module")
def expected(checkpoint, quantization):
    """Tokens of a full forward pass with the rounded values."""
    return naive_tokens(checkpoint, quantization)


@pytest.mark.slow
def test_tokens_are_those_of_the_rounded_values(checkpoint, quantization, expected):
    assert len(set().union(*expected)) > 5
    assert expected != naive_tokens(checkpoint, None), "rounding changed nothing"
    assert greedy_tokens(checkpoint, quantization) == expected


@pytest.mark.slow
def test_tokens_on_several_devices_are_those_of_one(checkpoint, store, quantization, expected):
    assert greedy_tokens(checkpoint, quantization, 4) == expected
    assert greedy_tokens(store, None, 2) == expected  # a store itself says what it contains


def test_a_store_holds_codes_and_says_so(checkpoint, store, quantization):
    manifest = read_manifest(store)
    assert {scheme.codes for scheme in manifest.schemes.values()} == {quantization}
    assert "layers.1.attention.out" in manifest.schemes
    size = sum(file.stat().st_size for file in store.glob("weights/layers*/*"))
    largest = {"int8": 0.4, "fp8": 0.4, "int4": 0.25}[quantization]
    assert size < largest * (checkpoint / "model.safetensors").stat().st_size
    specs, named = (
        stored_specs(store, specs_of(store), dtype=FLOAT32, quantization=name) for name in (None, quantization)
    )
    assert schemes_of(specs) == schemes_of(named) == manifest.schemes
    mesh = jax.make_mesh((4,), ("tensor",), devices=jax.devices()[:4])
    options = {"dtype": FLOAT32, "mesh": mesh, "progress": False}
    jax.tree.map(
        np.testing.assert_array_equal, load_weights(store, specs, **options), load_weights(checkpoint, specs, **options)
    )


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8"], indirect=True)
def test_what_cannot_be(checkpoint, store, tmp_path):
    with pytest.raises(ConfigError, match=r"quantization is int4, but the store .* was written with another: convert"):
        greedy_tokens(store, "int4")
    plain = tmp_path / "plain"
    convert(str(checkpoint), plain, progress=False)
    with pytest.raises(ConfigError, match=r"quantization is int4, but the store .* was written without: convert"):
        greedy_tokens(plain, "int4")


def test_weights_that_are_not_finite_are_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | MODELS["int8"]))
    tensors = {name: np.ones(shape, np.float32) for name, shape in source_shapes(specs_of(tmp_path)).items()}
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = np.inf
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight: .* not finite"):
        greedy_tokens(tmp_path, "int8")


@pytest.mark.slow
def test_random_codes_for_benchmarks(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | MODELS["int4"]))
    tokens = greedy_tokens(tmp_path, "int4", load_format="dummy")
    assert greedy_tokens(tmp_path, "int4", 4, load_format="dummy") == tokens


@pytest.mark.slow
def test_codes_of_a_quantized_checkpoint_are_held_or_dequantized(tmp_path):
    """On a CPU they are dequantized unless the engine is told otherwise; the tokens are the same."""
    config = {"num_bits": 8, "type": "int"}
    config = {"format": "int-quantized", "targets": ["Linear"], "weights": config}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": config}, "ignore": ["lm_head"]}
    fields = FIELDS | {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    rng, tensors = np.random.default_rng(0), {}
    for name, shape in source_shapes(specs_of(tmp_path)).items():
        if name.endswith("_proj.weight"):
            rows = shape[0], int(np.prod(shape[1:]))
            tensors[name] = rng.integers(-127, 128, rows).astype(np.int8)
            tensors[f"{name}_scale"] = rng.uniform(0.002, 0.006, (rows[0], 1)).astype(np.float32)
        else:
            tensors[name] = rng.normal(0.5 if len(shape) == 1 else 0.0, 0.3, shape).astype(np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    expected = greedy_tokens(tmp_path, None)
    assert len(set().union(*expected)) > 5
    assert greedy_tokens(tmp_path, None, dequantize=True) == expected
    # Activations are rounded too if the checkpoint says that they are to be.
    group = config["config_groups"]["group_0"] | {"input_activations": {"num_bits": 8, "type": "int", "dynamic": True}}
    config = config | {"config_groups": {"group_0": group}}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    assert greedy_tokens(tmp_path, None, quantize_activations=False) == expected
    assert prompt_logprobs(tmp_path) != prompt_logprobs(tmp_path, quantize_activations=False)
    convert(str(tmp_path), tmp_path / "store", progress=False)
    assert prompt_logprobs(tmp_path / "store") == prompt_logprobs(tmp_path, dequantize=False)
    for num_devices in (1, 4):
        assert greedy_tokens(tmp_path, None, num_devices, dequantize=False) == expected


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int4"], indirect=True)
def test_a_store_of_codes_is_served_as_values(store, expected):
    assert greedy_tokens(store, None, dequantize=True) == expected
    assert greedy_tokens(store, None, 2, dequantize=True) == expected
