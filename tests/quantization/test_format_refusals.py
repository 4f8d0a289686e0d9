"""What does not fit or is not supported in a quantized checkpoint is refused by name; what says nothing is not."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stored_matrices as stored
from golden_models import load_golden
from quantized_cases import AUTOROUND, AWQ, CASES, FLOAT, GPTQ, NF4, compressed, group, write_models

from jaxserve.errors import CheckpointError
from jaxserve.loading.huggingface import load_config, load_params
from jaxserve.models import get_family

SCALE = np.ones((), np.float32)
EXTRAS = {
    "fp8 tensor": {"q_proj.input_scale": SCALE, "q_proj.activation_scale": SCALE},
    "modelopt": {"q_proj.input_scale": SCALE, "k_proj.k_scale": SCALE, "v_proj.v_scale": SCALE},
    "float channel": {"k_scale": SCALE, "v_scale": SCALE},
    "fbgemm": {"q_proj.input_scale_ub": SCALE},
    "gptq": {"q_proj.bias": np.zeros(64, np.float16)},
    "packed channels": {"q_proj.weight_shape": np.array([64, 64], np.int32)},
}
"""Tensors of a layer's attention that say nothing about weights, no bias at all, and a shape in other integers."""


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
    specs = family.param_specs(family.config(fields))
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
        ("autoround", drop("qzeros"), "q_proj: tensors missing beside qweight: qzeros"),
        ("autoround, last groups are smaller", change("scales", lambda scales: scales[:-1]), "q_proj"),
        ("gptq", drop("qzeros"), "q_proj: tensors missing beside qweight: qzeros"),
        ("gptq", change("g_idx", lambda groups: groups - 1), "g_idx names groups that are not there"),
        ("gptq symmetric", change("qzeros", lambda words: words * 0), "said to be symmetric"),
        ("nvfp4", drop("weight_global_scale"), "missing beside weight_packed: weight_global_scale"),
        ("nvfp4", change("weight_global_scale", lambda scale: scale * 0), "weight_global_scale must be positive"),
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
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4' is not supported, only fp8"),
        ({"quant_method": "fp8", "weight_scale_semantics": "direct"}, "'direct' is not supported, only inverse"),
        (GPTQ | {"bits": 3}, "bits 3 is not supported, only 2, 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        (GPTQ | {"dynamic": {"+:.*down": {"bits": 3}}}, r"dynamic of .*: \+:\.\*down: bits 3 is not supported"),
        (GPTQ | {"dynamic": {"+:.*down": {"format": "marlin"}}}, "format is not supported, only other bits"),
        (GPTQ | {"dynamic": {"+:(": {}}}, "is no regular expression"),
        (GPTQ | {"dynamic": {"+:.*": 8}}, "must be an object"),
        (GPTQ | {"rotation": "hadamard"}, "config.json: rotation 'hadamard' is not supported"),
        (GPTQ | {"adapter": {"name": "lora", "path": "eora"}}, "config.json: adapter .* is not supported"),
        (GPTQ | {"sym": 1}, "sym must be true or false"),
        (AWQ | {"version": "gemv"}, "version 'gemv' is not supported, only gemm"),
        (AWQ | {"version": None, "format": "gemv_fast"}, "version 'gemv_fast' is not supported, only gemm"),
        (AWQ | {"bits": 8}, "bits 8 is not supported"),
        (AWQ | {"zero_point": False}, "zero_point False is not supported"),
        (AUTOROUND | {"packing_format": "auto_round:llm_compressor"}, "packing_format 'auto_round:llm_compressor' is"),
        (AUTOROUND | {"bits": 3}, "bits 3 is not supported, only 2, 4, 8"),
        (AUTOROUND | {"bits": 8, "packing_format": "auto_round:auto_awq"}, "bits 8 is not supported, only 4"),
        (AUTOROUND | {"sym": False}, "packing_format must say how zero points are stored"),
        (AUTOROUND | {"extra_config": {"v_proj": {"sym": False}}}, "packing_format must say how zero points"),
        (AUTOROUND | {"sym": None}, "sym must be true or false"),
        (AUTOROUND | {"group_size": 0}, "group_size must be a positive integer or -1, got 0"),
        (AUTOROUND | {"data_type": "mx_fp"}, "data_type 'mx_fp' is not supported, only int"),
        (AUTOROUND | {"act_bits": 8}, "act_bits 8 is not supported, only 16"),
        (AUTOROUND | {"rotation_config": {"block_size": 32}}, "rotation_config .* is not supported"),
        (AUTOROUND | {"extra_config": {"v_proj": {"bits": 6}}}, "extra_config of .*: v_proj: bits 6 is not supported"),
        (AUTOROUND | {"extra_config": {"(": {"bits": 8}}}, "is no regular expression"),
        (AUTOROUND | {"group_size": True}, "group_size must be a positive integer or -1, got True"),
        (AUTOROUND | {"bits": 16, "sym": None, "extra_config": {"v_proj": {"bits": 4}}}, "v_proj: sym must be true or"),
        (AUTOROUND | {"extra_config": {"v_proj": 8}}, "extra_config must be objects by module"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not supported, only FP8"),
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
