"""Quantized checkpoints load as the matrices that their codes encode; everything unknown in them is named."""

import copy
import functools
import json
import shutil

import jax
import numpy as np
import pytest
import stored_matrices as stored
from depths import quick_first, quick_only
from golden_models import GOLDENS, full_logits, load_golden, paged_chunk_logits, relative_error
from quantized_cases import CASES, write_models
from safetensors.numpy import load_file

from jaxserve.convert import convert
from jaxserve.layers.layouts import schemes_of
from jaxserve.layers.weight import Dense, Weight
from jaxserve.loading.weights import load_weights, stored_specs

MATRICES = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")


def values_of(params):
    """The values of all weights as arrays."""
    return jax.tree.map(
        lambda node: np.asarray(node.array() if isinstance(node, Weight) else node),
        params,
        is_leaf=lambda node: isinstance(node, Weight),
    )


@pytest.mark.parametrize("name", CASES)
def test_a_quantized_checkpoint_computes_what_its_floats_do(tmp_path, name):
    quantized, floats = write_models(tmp_path, *CASES[name])
    found, expected = load_golden(quantized), load_golden(floats)
    jax.tree.map(np.testing.assert_array_equal, found[0], expected[0])
    np.testing.assert_array_equal(full_logits(found), full_logits(expected))


def test_codes_of_a_family_with_inputs_before_outputs(tmp_path):
    golden = next(path for path in GOLDENS if path.name == "gpt2_tied")
    rng, quantized, floats = np.random.default_rng(0), {}, {}
    for name, tensor in load_file(golden / "model.safetensors").items():
        if tensor.ndim == 2 and ".h." in name:
            codes, values = stored.llm_int8(rng, *tensor.shape[::-1])
            quantized |= {f"{name.removesuffix('weight')}{leaf}": each for leaf, each in codes.items()}
            floats[name] = values.T
        else:
            quantized[name] = floats[name] = tensor
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    for path, tensors, says in ((tmp_path / "q", quantized, config), (tmp_path / "f", floats, {})):
        shutil.copytree(golden, path)
        (path / "config.json").write_text(json.dumps(json.loads((golden / "config.json").read_text()) | says))
        stored.save(tensors, path / "model.safetensors")
    found, expected = load_golden(tmp_path / "q"), load_golden(tmp_path / "f")
    jax.tree.map(np.testing.assert_array_equal, values_of(found[0]), values_of(expected[0]))


HELD = {
    "fp8 blocks": "fp8",
    "fp8 blocks that divide": "fp8",
    "fp8 powers of two": "fp8",
    "fp8 tensor": "fp8",
    "fbgemm": "fp8",
    "modelopt": "fp8",
    "float channel": "fp8",
    "float tensor": "fp8",
    "float block": "fp8",
    "int8": "int8",
    "packed groups": "int4",
    "packed channels": "int4",
    "packed zeros": "uint4",
    "packed order": "int4",
    "packed 8": "int8",
    "gptq": "uint4",
    "gptq order": "uint4",
    "gptq v2": "uint4",
    "gptq symmetric": "int4",
    "gptq symmetric, wrong label": "int4",
    "gptq 8": "int8",
    "gptq 2": "uint4",
    "awq": "uint4",
    "nvfp4": "e2m1",
    "nvfp4 of modelopt": "e2m1",
    "nvfp4 of modelopt, activations as they are": "e2m1",
    "mxfp8 of modelopt": "fp8",
    "mxfp8": "fp8",
    "nvfp4 and fp8 of modelopt": ("e2m1", "fp8"),
    "mxfp4": "e2m1",
    "packed 4 and 8": ("int4", "int8"),
    "gptq dynamic": ("uint4", "int8", "int4"),
    "autoround": "int4",
    "autoround with groups": "uint4",
    "autoround, zero points as they are": ("uint4", "int8", "int4"),
    "autoround, last groups are smaller": "int4",
    "autoround of AWQ": "uint4",
    "nf4": "nf4",
    "nf4 nested": "nf4",
    "nf4 in blocks across rows": "nf4",
    "fp4": "fp4",
    "llm.int8": "int8",
}
"""The codes that an engine holds of each; None where it holds floats."""
BLOCKS_THAT_DIVIDE = {"quant_method": "fp8", "weight_block_size": [24, 32]}


@pytest.mark.parametrize("name", quick_only(HELD, *list(HELD)[::4]))
def test_codes_that_are_held_as_they_are_stand_for_the_same_values(tmp_path, name):
    blocks = functools.partial(stored.fp8, scheme="block", leaf="weight_scale_inv", block=(24, 32))
    quantized, floats = write_models(
        tmp_path, *(CASES | {"fp8 blocks that divide": (BLOCKS_THAT_DIVIDE, blocks)})[name]
    )
    _, config, family, _, mesh = load_golden(floats)
    float32 = np.dtype(np.float32)
    specs = stored_specs(
        quantized,
        family.param_specs(config),
        dtype=float32,
        quantization=None,
    )
    schemes = schemes_of(specs)
    matrices = {f"layers.{layer}.{name}" for layer in range(len(specs["layers"])) for name in MATRICES}
    assert schemes.keys() == (set() if HELD[name] is None else matrices)
    kinds = {HELD[name]} if isinstance(HELD[name], str) else set(HELD[name] or ())
    assert {scheme.codes for scheme in schemes.values()} == kinds
    params = load_weights(quantized, specs, dtype=float32, mesh=mesh, progress=False)
    values = values_of(params)
    plain = values_of(load_weights(floats, family.param_specs(config), dtype=float32, mesh=mesh, progress=False))
    # Packages round products to the type of the scales, which codes that are held do not.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2**-8), values, plain)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda groups: np.roll(groups, 1), "parts of it have their inputs in different orders"),
        (lambda groups: np.where(groups == 1, 0, groups), "its groups are not of equal sizes"),
    ],
)
def test_orders_of_inputs_that_are_not_held(tmp_path, caplog, change, reason):
    quantized, floats = write_models(tmp_path, *CASES["gptq order"])
    tensors, name = stored.read(quantized / "model.safetensors"), "model.layers.0.self_attn.k_proj.g_idx"
    stored.save(tensors | {name: change(tensors[name]).astype(np.int32)}, quantized / "model.safetensors")
    specs = load_golden(floats)[2].param_specs(load_golden(floats)[1])
    with caplog.at_level("INFO"):
        schemes = schemes_of(stored_specs(quantized, specs, dtype=np.dtype(np.float32), quantization=None))
    assert f"codes of 1 matrices are held as floats: {reason}" in caplog.text
    assert "layers.0.attention.qkv" not in schemes
    assert schemes["layers.0.attention.out"].has_order


NEIGHBOURS = ["gptq order", "packed order", "gptq", "packed zeros", "awq", "float channel", "int8", "mxfp8"]


@pytest.mark.parametrize("name", quick_only(NEIGHBOURS, "gptq order", "gptq", "float channel"))
def test_a_part_has_the_values_of_its_codes_whatever_its_neighbours_are(tmp_path, monkeypatch, caplog, name):
    """One part of a fused matrix is of floats, or all have orders of their own: nothing is rounded for that."""
    orders = np.random.default_rng(5)
    monkeypatch.setattr(stored, "product", lambda codes, scales: codes.astype(np.float32) * scales.astype(np.float32))
    monkeypatch.setattr(stored, "in_order", lambda inputs, group: orders.permutation(np.arange(inputs) // group))
    quantized, floats = write_models(tmp_path, *CASES[name])
    if "order" not in name:
        module = "model.layers.0.self_attn.k_proj."
        tensors = stored.read(quantized / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(module)}
        part = {f"{module}weight": stored.read(floats / "model.safetensors")[f"{module}weight"]}
        stored.save(kept | part, quantized / "model.safetensors")
    _, config, family, _, mesh = load_golden(floats)
    float32 = np.dtype(np.float32)
    with caplog.at_level("INFO"):
        specs = stored_specs(quantized, family.param_specs(config), dtype=float32, quantization=None)
    assert "matrices are held as floats: parts of it" in caplog.text
    params = load_weights(quantized, specs, dtype=float32, mesh=mesh, progress=False)
    expected = load_golden(floats)[0]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), values_of(params), values_of(expected))


@pytest.mark.parametrize("name", CASES)
def test_a_config_without_weights_implies_the_same_schemes(tmp_path, name):
    """Sizes are known before a download, and random weights are as the model's; groups as the config states them."""
    config, make = CASES[name]
    sizes = {"gptq": 8, "gptq 2": 16, "packed groups": 8, "packed zeros": 16, "packed order": 8, "packed 8": 32}
    if "config_groups" in config:
        for described in (config := copy.deepcopy(config))["config_groups"].values():
            described["weights"] |= {"group_size": sizes.get(name), "symmetric": name != "packed zeros"}
    elif config.get("quant_method") == "gptq":
        config = config | {"group_size": sizes.get(name, 8)}
    elif config.get("quant_method", "modelopt") == "modelopt":
        config = config | {"exclude_modules": ["lm_head*"]}
    quantized, floats = write_models(tmp_path, config, make)
    specs = load_golden(floats)[2].param_specs(load_golden(floats)[1])
    there = schemes_of(stored_specs(quantized, specs, dtype=np.dtype(np.float32), quantization=None))
    (quantized / "model.safetensors").unlink()
    expected = schemes_of(stored_specs(quantized, specs, dtype=np.dtype(np.float32), quantization=None))
    is_implied = name not in NOT_IMPLIED

    def described(schemes):
        return {where: (scheme.codes, scheme.group_size, scheme.has_zeros) for where, scheme in schemes.items()}

    assert (described(expected) == described(there)) == is_implied


NOT_IMPLIED = {
    "packed 4 and 8": "both groups have the same targets",
    "nvfp4 and fp8 of modelopt": "the config does not list the matrices",
}
"""Cases in which only tensors tell."""


@pytest.mark.parametrize("says", [{}, {"quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}}, {"bits": 4}])
def test_files_that_declare_it_instead_of_the_config(tmp_path, says):
    """Checkpoints of NVIDIA, AutoGPTQ and AutoAWQ do so; scales of activations and of KV are not needed.

    A field of the config that names no method says nothing then.
    """
    for index, (file, content, make) in enumerate(
        [
            (
                "hf_quant_config.json",
                {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
                CASES["modelopt"][1],
            ),
            ("quantize_config.json", {"bits": 4, "group_size": 8, "sym": False}, stored.gptq),
            ("quantize_config.json", {"quant_method": "awq", "bits": 4, "group_size": 8}, stored.awq),  # GPTQModel's
            ("quant_config.json", {"w_bit": 4, "q_group_size": 8, "zero_point": True, "version": "GEMM"}, stored.awq),
        ]
    ):
        quantized, floats = write_models(tmp_path / str(index), says, make)
        (quantized / file).write_text(json.dumps(content))
        jax.tree.map(np.testing.assert_array_equal, load_golden(quantized)[0], load_golden(floats)[0])


STORED = ["fp8 blocks", "gptq", "gptq order", "packed zeros", "nvfp4", "mxfp4", "nf4 nested", "packed 4 and 8"]


@pytest.mark.parametrize("name", STORED)
def test_a_store_keeps_codes_and_loads_as_floats_too(tmp_path, name):
    config, make = CASES[name]
    quantized, floats = write_models(tmp_path, config, make)
    if name == "gptq":  # AutoGPTQ's checkpoints say it twice
        (quantized / "quantize_config.json").write_text(json.dumps(config))
    manifest = convert(str(quantized), tmp_path / "store", dtype="float32", progress=False)
    assert manifest.config["quantization_config"] == config
    assert (tmp_path / "store" / "quantize_config.json").exists() == (name == "gptq")
    _, config, family, _, mesh = load_golden(floats)
    specs, float32 = family.param_specs(config), np.dtype(np.float32)
    held = stored_specs(quantized, specs, dtype=float32, quantization=None)
    assert schemes_of(stored_specs(tmp_path / "store", specs, dtype=float32, quantization=None)) == schemes_of(held)
    codes = load_weights(quantized, held, dtype=float32, mesh=mesh, progress=False)
    stored_codes = load_weights(tmp_path / "store", held, dtype=float32, mesh=mesh, progress=False)
    jax.tree.map(np.testing.assert_array_equal, stored_codes, codes)
    dense = stored_specs(tmp_path / "store", specs, dtype=float32, quantization=None, dequantizes=True)
    values = load_weights(tmp_path / "store", dense, dtype=float32, mesh=mesh, progress=False)
    jax.tree.map(np.testing.assert_array_equal, values_of(values), values_of(codes))


TRUE = ["fp8 blocks", "gptq order", "packed zeros", "gptq dynamic", "awq", "nvfp4", "mxfp4", "nf4 nested", "llm.int8"]


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_first(TRUE))
def test_logits_of_held_codes_are_those_of_their_values(tmp_path, name):
    """Prompts and decode steps over paged KV, in float32: differences are of the order of sums, nothing else."""
    quantized, floats = write_models(tmp_path, *CASES[name])
    _, config, family, arrays, mesh = load_golden(floats)
    specs = stored_specs(quantized, family.param_specs(config), dtype=np.dtype(np.float32), quantization=None)
    codes = load_weights(quantized, specs, dtype=np.dtype(np.float32), mesh=mesh, progress=False)
    is_weight = {"is_leaf": lambda node: isinstance(node, Weight)}
    values = jax.tree.map(lambda node: Dense(node.array()) if isinstance(node, Weight) else node, codes, **is_weight)
    expected = full_logits((values, config, family, arrays, mesh))
    held = codes, config, family, arrays, mesh
    assert relative_error(full_logits(held), expected) < 2e-5
    prompt_then_decode, decode_then_prompt = paged_chunk_logits(held)
    assert relative_error(prompt_then_decode, expected) < 2e-5
    assert relative_error(prompt_then_decode, decode_then_prompt) < 2e-5


def test_a_store_of_values(tmp_path):
    quantized, floats = write_models(tmp_path, *CASES["gptq"])
    manifest = convert(str(quantized), tmp_path / "store", dtype="float32", dequantize=True, progress=False)
    assert manifest.schemes == {}
    _, config, family, _, mesh = load_golden(floats)
    specs = family.param_specs(config)
    loaded = load_weights(tmp_path / "store", specs, dtype=np.dtype(np.float32), mesh=mesh, progress=False)
    jax.tree.map(np.testing.assert_array_equal, loaded, load_golden(floats)[0])
