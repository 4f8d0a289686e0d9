"""Quantized checkpoints load as the matrices that their codes encode; everything unknown in them is named."""

import copy
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stored_matrices as stored
from depths import quick_first
from golden_models import GOLDENS, full_logits, load_golden, paged_chunk_logits, relative_error

from jaxserve.convert import convert
from jaxserve.errors import CheckpointError
from jaxserve.layers.params import schemes_of
from jaxserve.layers.weight import Dense, Weight
from jaxserve.loading.huggingface import load_config, load_params
from jaxserve.loading.weights import load_weights, stored_specs
from jaxserve.models import get_family

LLAMA = next(path for path in GOLDENS if path.name == "llama_untied")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}


def group(format_name, *, kind="int", bits=4, **weights):
    return {"format": format_name, "targets": ["Linear"], "weights": {"num_bits": bits, "type": kind} | weights}


def compressed(*groups):
    named = {f"group_{index}": each for index, each in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, "ignore": ["lm_head"]}


MATRICES = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
MODULE = "model.layers.0.self_attn.q_proj"
BLOCK = (24, 40)  # neither divides a matrix
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FLOAT = group("float-quantized", kind="float", bits=8)
CASES = {
    "fp8 blocks": (FP8_BLOCKS, functools.partial(stored.fp8, scheme="block", leaf="weight_scale_inv", block=BLOCK)),
    "fp8 powers of two": (
        FP8_BLOCKS | {"scale_fmt": "ue8m0"},
        functools.partial(stored.fp8, scheme="block", leaf="weight_scale_inv", block=BLOCK, dtype=stored.E8M0),
    ),
    "fp8 tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        functools.partial(stored.fp8, scheme="tensor", leaf="weight_scale_inv"),
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, functools.partial(stored.fp8, scheme="channel")),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, functools.partial(stored.fp8, scheme="tensor")),
    "float channel": (compressed(FLOAT), functools.partial(stored.fp8, scheme="channel", dtype=stored.BF16)),
    "float tensor": (compressed(FLOAT), functools.partial(stored.fp8, scheme="one", dtype=stored.BF16)),
    "float block": (
        compressed(group("float-quantized", kind="float", bits=8, block_structure=list(BLOCK))),
        functools.partial(stored.fp8, scheme="block", block=BLOCK),
    ),
    "int8": (compressed(group("int-quantized", bits=8)), stored.int8),
    "packed groups": (compressed(group("pack-quantized")), functools.partial(stored.packed, group=8)),
    "packed channels": (compressed(group("pack-quantized")), stored.packed),
    "packed zeros": (compressed(group("pack-quantized")), functools.partial(stored.packed, group=16, has_zeros=True)),
    "packed order": (compressed(group("pack-quantized")), functools.partial(stored.packed, group=8, has_order=True)),
    "packed 8": (compressed(group("pack-quantized", bits=8)), functools.partial(stored.packed, bits=8, group=32)),
    "gptq": (GPTQ, stored.gptq),
    "gptq order": (GPTQ, functools.partial(stored.gptq, has_order=True)),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, functools.partial(stored.gptq, version=2)),
    "gptq symmetric": (GPTQ | {"sym": True}, functools.partial(stored.gptq, is_symmetric=True)),
    "gptq symmetric, wrong label": (GPTQ | {"sym": True}, functools.partial(stored.gptq, is_symmetric=True, version=2)),
    "gptq 8": (GPTQ | {"bits": 8}, functools.partial(stored.gptq, bits=8)),
    "gptq 2": (GPTQ | {"bits": 2}, functools.partial(stored.gptq, bits=2, group=16)),
    "awq": (AWQ, stored.awq),
    "nvfp4": (
        compressed(group("nvfp4-pack-quantized", kind="float", group_size=16)),
        functools.partial(stored.nvfp4, package="compressed-tensors"),
    ),
    "nvfp4 of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        functools.partial(stored.nvfp4, package="modelopt"),
    ),
    "nvfp4 and fp8 of modelopt": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"model.layers.0.mlp.down_proj": {"quant_algo": "FP8"}, "x": {"quant_algo": "NVFP4"}},
        },
        stored.by_name(
            other=functools.partial(stored.nvfp4, package="modelopt"),
            down_proj=functools.partial(stored.fp8, scheme="tensor"),
        ),
    ),
    "mxfp4": (compressed(group("mxfp4-pack-quantized", kind="float", group_size=32)), stored.mxfp4),
    "packed 4 and 8": (
        compressed(group("pack-quantized"), group("pack-quantized", bits=8)),
        stored.by_name(
            other=functools.partial(stored.packed, group=32), v_proj=functools.partial(stored.packed, bits=8, group=16)
        ),
    ),
    "gptq dynamic": (
        GPTQ
        | {"dynamic": {"-:.*no_such": {}, r"+:.*\.v_proj$": {"bits": 8, "group_size": 16}, ".*down": {"sym": True}}},
        stored.by_name(
            other=stored.gptq,
            v_proj=functools.partial(stored.gptq, bits=8, group=16),
            down_proj=functools.partial(stored.gptq, is_symmetric=True),
        ),
    ),
    "nf4": (NF4, stored.bitsandbytes),
    "nf4 nested": (NF4, functools.partial(stored.bitsandbytes, nested=True, dtype="float32")),
    "nf4 in blocks across rows": (NF4, functools.partial(stored.bitsandbytes, block=256)),
    "fp4": (NF4 | {"bnb_4bit_quant_type": "fp4"}, functools.partial(stored.bitsandbytes, kind="fp4")),
    "llm.int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, stored.llm_int8),
}


def values_of(params):
    """The values of all weights as arrays."""
    return jax.tree.map(
        lambda node: np.asarray(node.array() if isinstance(node, Weight) else node),
        params,
        is_leaf=lambda node: isinstance(node, Weight),
    )


def is_linear(name):
    return name.endswith("_proj.weight")


def write_models(folder, config, make):
    """Write and return (a Llama whose matrices are quantized, the same with the floats that they encode)."""
    fields = json.loads((LLAMA / "config.json").read_text()) | SIZES
    family = get_family(fields)
    rng = np.random.default_rng(7)
    quantized, floats = {}, {}
    for spec in jax.tree.leaves(family.param_specs(family.Config.from_hf(fields))):
        for name, shape in zip(spec.source, spec.source_shapes, strict=True):
            if is_linear(name):
                named = {"name": name.removesuffix(".weight")} if hasattr(make, "takes_name") else {}
                tensors, values = make(rng, shape[0], int(np.prod(shape[1:])), **named)
                quantized |= {f"{name.removesuffix('weight')}{leaf}": tensor for leaf, tensor in tensors.items()}
                floats[name] = values.astype(np.float32)
            else:
                quantized[name] = floats[name] = rng.normal(size=shape).astype(np.float32)
    paths = []
    for name, tensors, says in (("q", quantized, {"quantization_config": config}), ("f", floats, {})):
        path = folder / name
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(fields | says))
        stored.save(tensors, path / "model.safetensors")
        shutil.copyfile(LLAMA / "golden.npz", path / "golden.npz")
        paths.append(path)
    return paths


@pytest.mark.parametrize("name", CASES)
def test_a_quantized_checkpoint_computes_what_its_floats_do(tmp_path, name):
    quantized, floats = write_models(tmp_path, *CASES[name])
    found, expected = load_golden(quantized), load_golden(floats)
    jax.tree.map(np.testing.assert_array_equal, found[0], expected[0])
    np.testing.assert_array_equal(full_logits(found), full_logits(expected))


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
    "packed order": None,
    "packed 8": "int8",
    "gptq": "uint4",
    "gptq order": None,
    "gptq v2": "uint4",
    "gptq symmetric": "int4",
    "gptq symmetric, wrong label": "int4",
    "gptq 8": "int8",
    "gptq 2": "uint4",
    "awq": "uint4",
    "nvfp4": "e2m1",
    "nvfp4 of modelopt": "e2m1",
    "nvfp4 and fp8 of modelopt": ("e2m1", "fp8"),
    "mxfp4": "e2m1",
    "packed 4 and 8": ("int4", "int8"),
    "gptq dynamic": ("uint4", "int8", "int4"),
    "nf4": "nf4",
    "nf4 nested": "nf4",
    "nf4 in blocks across rows": "nf4",
    "fp4": "fp4",
    "llm.int8": "int8",
}
"""The codes that an engine holds of each; None where it holds floats."""
BLOCKS_THAT_DIVIDE = {"quant_method": "fp8", "weight_block_size": [24, 32]}


@pytest.mark.parametrize("name", HELD)
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


@pytest.mark.parametrize("name", CASES)
def test_a_config_without_weights_implies_the_same_schemes(tmp_path, name):
    """Sizes are known before a download, and random weights are as the model's; groups as the config states them."""
    config, make = CASES[name]
    sizes = {"gptq": 8, "gptq 2": 16, "packed groups": 8, "packed zeros": 16, "packed order": 8, "packed 8": 32}
    if "config_groups" in config:
        for described in (config := copy.deepcopy(config))["config_groups"].values():
            described["weights"] |= {"group_size": sizes.get(name), "symmetric": name != "packed zeros"}
    elif config["quant_method"] == "gptq":
        config = config | {"group_size": sizes.get(name, 8)}
    elif config["quant_method"] == "modelopt":
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
    "packed order": "the order of groups is in a tensor",
    "gptq order": "the order of groups is in a tensor",
    "packed 4 and 8": "both groups have the same targets",
    "nvfp4 and fp8 of modelopt": "the config does not list the matrices",
}
"""Cases in which only tensors tell."""


def test_files_that_declare_it_instead_of_the_config(tmp_path):
    """Checkpoints of NVIDIA, AutoGPTQ and AutoAWQ do so; scales of activations and of KV are not needed."""
    for index, (file, content, make) in enumerate(
        [
            (
                "hf_quant_config.json",
                {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
                CASES["modelopt"][1],
            ),
            ("quantize_config.json", {"bits": 4, "group_size": 8, "sym": False}, stored.gptq),
            ("quant_config.json", {"w_bit": 4, "q_group_size": 8, "zero_point": True, "version": "GEMM"}, stored.awq),
        ]
    ):
        quantized, floats = write_models(tmp_path / str(index), {}, make)
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
    assert "quantization_config" not in manifest.config
    assert not (tmp_path / "store" / "quantize_config.json").exists()
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


TRUE = ["fp8 blocks", "packed zeros", "gptq dynamic", "awq", "nvfp4", "mxfp4", "nf4 nested", "llm.int8"]


@pytest.mark.parametrize("name", quick_first(TRUE, 2))
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
    assert relative_error(full_logits(held), expected) < 1e-5
    prompt_then_decode, decode_then_prompt = paged_chunk_logits(held)
    assert relative_error(prompt_then_decode, expected) < 1e-5
    assert relative_error(prompt_then_decode, decode_then_prompt) < 1e-5


def test_a_store_of_values(tmp_path):
    quantized, floats = write_models(tmp_path, *CASES["gptq"])
    manifest = convert(str(quantized), tmp_path / "store", dtype="float32", dequantize=True, progress=False)
    assert manifest.schemes == {}
    _, config, family, _, mesh = load_golden(floats)
    specs = family.param_specs(config)
    loaded = load_weights(tmp_path / "store", specs, dtype=np.dtype(np.float32), mesh=mesh, progress=False)
    jax.tree.map(np.testing.assert_array_equal, loaded, load_golden(floats)[0])


SCALE = np.ones((), np.float32)
EXTRAS = {
    "fp8 tensor": {"q_proj.input_scale": SCALE, "q_proj.activation_scale": SCALE},
    "modelopt": {"q_proj.input_scale": SCALE, "k_proj.k_scale": SCALE, "v_proj.v_scale": SCALE},
    "float channel": {"k_scale": SCALE, "v_scale": SCALE},
    "fbgemm": {"q_proj.input_scale_ub": SCALE},
    "gptq": {"q_proj.bias": np.zeros(64, np.float16)},
}
"""Tensors of a layer's attention that say nothing about weights, and no bias at all."""


@pytest.mark.parametrize("name", EXTRAS)
def test_tensors_that_say_nothing_about_weights(tmp_path, name):
    quantized, floats = write_models(tmp_path, *CASES[name])
    extras = {f"model.layers.0.self_attn.{key}": tensor for key, tensor in EXTRAS[name].items()}
    stored.save(stored.read(quantized / "model.safetensors") | extras, quantized / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load(quantized), load_golden(floats)[0])


def load(path):
    fields = load_config(path)
    family = get_family(fields)
    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    specs = family.param_specs(family.Config.from_hf(fields))
    return load_params(path, specs, dtype=np.dtype(jnp.float32), mesh=mesh, progress=False)


def drop(leaf):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.endswith(f"q_proj.{leaf}")}


def change(leaf, make):
    return lambda tensors: {
        name: make(tensor) if name.endswith(f"q_proj.{leaf}") else tensor for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("fp8 blocks", drop("weight_scale_inv"), r"q_proj: 8-bit codes need two axes and one of weight_scale"),
        ("fp8 blocks", change("weight_scale_inv", lambda scales: scales[:-1]), "which fits no codes of"),
        ("int8", drop("weight_scale"), "q_proj: 8-bit codes need two axes and one of weight_scale"),
        ("packed groups", drop("weight_scale"), "q_proj: tensors missing beside weight_packed: weight_scale"),
        ("packed groups", drop("weight_packed"), r"missing: model.layers.0.self_attn.q_proj.weight"),
        ("packed groups", change("weight_packed", lambda words: words[:, :-1]), "q_proj"),
        ("packed zeros", change("weight_zero_point", lambda words: words[:, :-1]), "weight_zero_point is"),
        ("packed order", change("weight_g_idx", lambda groups: groups + 99), "weight_g_idx names groups"),
        ("packed groups", change("weight_shape", lambda shape: shape + 8), "weight_shape .* is not"),
        ("gptq", drop("g_idx"), "q_proj: tensors missing beside qweight: g_idx"),
        ("gptq", drop("qzeros"), "q_proj: tensors missing beside qweight: qzeros"),
        ("gptq", change("g_idx", lambda groups: groups - 1), "g_idx names groups that are not there"),
        ("gptq symmetric", change("qzeros", lambda words: words * 0), "said to be symmetric"),
        ("nvfp4", drop("weight_global_scale"), "missing beside weight_packed: weight_global_scale"),
        (
            "nvfp4",
            change("weight_global_scale", lambda scale: scale * 0),
            "weight_global_scale must be positive",
        ),
        ("nvfp4 of modelopt", drop("weight_scale_2"), "missing beside weight: weight_scale_2"),
        ("nvfp4 of modelopt", change("weight_scale", lambda scales: scales[:-1]), "do not fit"),
        ("awq", drop("scales"), "q_proj: tensors missing beside qweight: scales"),
        ("awq", change("scales", lambda scales: scales[:-1]), "do not fit"),
        ("awq", lambda tensors: tensors | {"model.layers.0.self_attn.q_proj.extra": np.ones(3, np.float32)}, "extra"),
        (
            "gptq",
            lambda tensors: tensors | {"model.layers.0.self_attn.q_proj.weight": np.ones(3, np.float32)},
            "q_proj",
        ),
    ],
)
def test_every_tensor_is_needed_and_fits(tmp_path, name, damage, message):
    quantized, _ = write_models(tmp_path, *CASES[name])
    tensors = stored.read(quantized / "model.safetensors")
    stored.save(damage(tensors), quantized / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(quantized)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "one of load_in_4bit and load_in_8bit must be true"),
        ({"quant_method": "torchao"}, "is 'torchao'"),
        (NF4 | {"bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type 'af4' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "the size of a block must be two positive integers"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        (GPTQ | {"bits": 3}, "bits 3 is not supported, only 2, 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        (GPTQ | {"dynamic": {"+:.*down": {"bits": 3}}}, r"dynamic of .*: \+:\.\*down: bits 3 is not supported"),
        (GPTQ | {"dynamic": {"+:.*down": {"format": "marlin"}}}, "format is not supported, only other bits"),
        (GPTQ | {"dynamic": {"+:(": {}}}, "is no regular expression"),
        (GPTQ | {"dynamic": {"+:.*": 8}}, "must be an object"),
        (GPTQ | {"sym": 1}, "sym must be true or false"),
        (AWQ | {"version": "gemv"}, "version 'gemv' is not supported, only gemm"),
        (AWQ | {"bits": 8}, "bits 8 is not supported"),
        (AWQ | {"zero_point": False}, "zero_point False is not supported"),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "quant_algo 'W4A8_AWQ' is not supported, only FP8",
        ),
        (compressed(group("pack-quantized", bits=3)), "'pack-quantized' of 'int' weights of 3 bits is not supported"),
        (
            compressed(group("mxfp4-pack-quantized", kind="float", symmetric=False)),
            "'mxfp4-pack-quantized' of 'float' weights of 4 bits",
        ),
        (
            compressed(group("mxfp6-pack-quantized", kind="float", bits=6)),
            "'mxfp6-pack-quantized' of 'float' weights of 6 bits",
        ),
        (compressed() | {"config_groups": []}, "config_groups must be an object"),
        (compressed(FLOAT) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config .* not supported"),
        (compressed(FLOAT) | {"transform_config": {"a": 1}}, "transform_config .* is not supported"),
        (compressed(FLOAT | {"output_activations": {"num_bits": 8}}), "output_activations are not supported"),
    ],
)
def test_what_is_not_served_is_named_from_the_config_alone(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    with pytest.raises(CheckpointError, match=message) as failure:
        load_config(tmp_path)
    assert "\n" not in str(failure.value)


def test_two_files_that_contradict_each_other(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": GPTQ}))
    (tmp_path / "quant_config.json").write_text(json.dumps({"w_bit": 4, "version": "gemm"}))
    with pytest.raises(CheckpointError, match=r"in its config\.json and quant_config\.json contradict each other"):
        load_config(tmp_path)
