"""Tiny models whose matrices are quantized, and the tokens that an engine and plain forward passes make with them."""

import json

import jax
import numpy as np
import stored_matrices as stored
from engine_harness import request, run
from naive import naive_greedy
from safetensors.numpy import save_file

from jaxserve.config import EngineConfig
from jaxserve.engine.startup import start_engine
from jaxserve.layers.weight import Dense, Weight
from jaxserve.loading.huggingface import source_shapes
from jaxserve.loading.weights import load_config, load_weights, stored_specs
from jaxserve.models import get_family
from jaxserve.sampling_params import SamplingParams

FLOAT32 = np.dtype(np.float32)
VOCABULARY = 96
FIELDS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
"""The sizes of a config.json."""
PROMPTS = [np.random.default_rng(length).integers(0, VOCABULARY, length).tolist() for length in (1, 5, 21)]


def specs_of(path):
    fields = load_config(path)
    family = get_family(fields)
    return family.param_specs(family.config(fields))


def write_random(path, fields):
    """Write a tiny random model, whose logits depend on the attended tokens."""
    (path / "config.json").write_text(json.dumps(fields))
    rng = np.random.default_rng(0)
    shapes = source_shapes(specs_of(path)).items()
    spread = {name: (0.5 if len(shape) == 1 else 0.0, 0.3, shape) for name, shape in shapes}  # gains and biases
    save_file({name: rng.normal(*of).astype(np.float32) for name, of in spread.items()}, path / "model.safetensors")


def write_quantized(path, fields, config, make, *, is_quantized):
    """Write a random model; `make` packs the matrices of the modules that `is_quantized` picks by name."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    rng, tensors = np.random.default_rng(0), {}
    for name, shape in source_shapes(specs_of(path)).items():
        if name.endswith(".weight") and len(shape) > 1 and is_quantized(name):
            module = name.removesuffix(".weight")
            named = {"name": module} if hasattr(make, "takes_name") else {}
            parts, _ = make(rng, shape[0], int(np.prod(shape[1:])), **named)
            tensors |= {f"{module}.{leaf}": part for leaf, part in parts.items()}
        else:
            tensors[name] = rng.normal(0.5 if len(shape) == 1 else 0.0, 0.3, shape).astype(np.float32)
    (path / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    stored.save(tensors, path / "model.safetensors")
    return path


def greedy_tokens(path, quantization, num_devices=1, **options):
    """Return the tokens that an engine makes after each of PROMPTS."""
    config = EngineConfig(
        model=str(path),
        quantization=quantization,
        tensor_parallel_size=num_devices,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        block_size=4,
        kv_cache_memory=2**20,
        warmup="none",
        **options,
    )
    engine, _ = start_engine(config, mesh=None, progress=False)
    results = run(engine, [request(f"r{index}", prompt, 12) for index, prompt in enumerate(PROMPTS)])
    engine.close()
    return [results[f"r{index}"].token_ids for index in range(len(PROMPTS))]


def prompt_logprobs(path, **options):
    """Return the log probabilities of the tokens of the longest prompt."""
    config = EngineConfig(model=str(path), kv_cache_memory=2**20, block_size=4, warmup="none", **options)
    engine, _ = start_engine(config, mesh=None, progress=False)
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    [result] = run(engine, [request("r", PROMPTS[-1], 1, params)]).values()
    engine.close()
    return list(map(str, result.prompt_logprobs))


def naive_tokens(path, quantization):
    """Return the tokens of full forward passes with plain arrays of the dequantized values in float32."""
    fields = load_config(path)
    family = get_family(fields)
    config = family.config(fields)
    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    specs = stored_specs(path, family.param_specs(config), dtype=FLOAT32, quantization=quantization)
    params = jax.tree.map(
        lambda node: Dense(node.array()) if isinstance(node, Weight) else node,
        load_weights(path, specs, dtype=FLOAT32, mesh=mesh, progress=False),
        is_leaf=lambda node: isinstance(node, Weight),
    )
    with jax.set_mesh(mesh):
        return [naive_greedy(params, config, family, prompt, 12, padded_length=64) for prompt in PROMPTS]
