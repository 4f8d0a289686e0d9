"""Codes that an engine holds, also of experts and where groups do not divide over devices: its tokens are those of a
float32 forward pass on one device with the dequantized values.
"""

import functools
import json

import jax
import pytest
import quantized_models
import stored_matrices as stored
from golden_models import GOLDENS
from quantized_models import FLOAT32, greedy_tokens, naive_tokens, specs_of, write_quantized

from jaxserve.config import EngineConfig
from jaxserve.engine.checkpoint import choose_weights
from jaxserve.layers.layouts import schemes_of
from jaxserve.loading.weights import stored_specs

QWEN = quantized_models.FIELDS | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
QWEN |= {"moe_intermediate_size": 48}
MIXTRAL = quantized_models.FIELDS | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
FIELDS = quantized_models.FIELDS | {"num_hidden_layers": 1, "num_key_value_heads": 8}
LLAMA = FIELDS | {"model_type": "llama"}
LATENT = FIELDS | {
    "model_type": "deepseek_v2",
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 0,
}
HYBRID = FIELDS | {
    "model_type": "qwen3_next",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
MAMBA = FIELDS | {
    "model_type": "nemotron_h",
    "layers_block_type": ["mamba", "moe", "attention", "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 32]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
CASES = {
    # 96 inputs on 8 devices are 12 of a group of 32 on each.
    "groups": (LLAMA, GPTQ, functools.partial(stored.gptq, group=32)),
    # Query, key and value have a scale each.
    "scales of tensors": (LLAMA, {"quant_method": "fp8"}, functools.partial(stored.fp8, scheme="tensor")),
    # 88 inputs on 8 devices are 11 each, and two 4-bit codes share a byte.
    "odd inputs": (LLAMA | {"intermediate_size": 88}, GPTQ | {"group_size": 8}, stored.gptq),
    # 6 experts are not whole on 4 devices: 48 inner values are 12 of a block of 32 on each.
    "latent attention and experts": (LATENT, BLOCKS, functools.partial(stored.fp8, scheme="block", block=(16, 32))),
    # Queries and their gates are rows of one tensor; those of a key head, of one block or of two.
    "gated delta rule and gates": (HYBRID, BLOCKS, functools.partial(stored.fp8, scheme="block", block=(16, 32))),
    # Gates, values, B, C and step sizes are rows of one tensor.
    "Mamba-2 and experts without gates": (MAMBA, BLOCKS, functools.partial(stored.fp8, scheme="block", block=(16, 32))),
}


def compressed(format_name, kind, bits):
    group = {"format": format_name, "targets": ["Linear"], "weights": {"num_bits": bits, "type": kind}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
FP8_OF_CHANNELS = compressed("float-quantized", "float", 8)
OF_GROUPS = functools.partial(stored.gptq, group=16, is_symmetric=True)
# On several devices one whose scales belong to groups of inputs, and one with a scale for each output.
EXPERTS = {
    "fp8 of blocks": (QWEN, FP8, functools.partial(stored.fp8, scheme="block", block=(32, 32)), 1),
    "packed": (QWEN, compressed("pack-quantized", "int", 4), functools.partial(stored.packed, group=16), 1),
    "awq": (MIXTRAL, AWQ, functools.partial(stored.awq, group=16), 1),
    "gptq": (QWEN, GPTQ | {"group_size": 16, "sym": True}, OF_GROUPS, 4),
    "fp8 of channels": (MIXTRAL, FP8_OF_CHANNELS, functools.partial(stored.fp8, scheme="channel"), 4),
}


def assert_tokens(path, num_devices):
    expected = naive_tokens(path, None)
    assert len(set().union(*expected)) > 5
    assert greedy_tokens(path, None, num_devices, dequantize=False) == expected


@pytest.mark.parametrize(("num_devices", "floats"), [(8, {"layers.0.mlp.down"}), (4, set())])
def test_the_log_names_matrices_that_a_mesh_makes_floats(tmp_path, caplog, num_devices, floats):
    fields = LLAMA | {"intermediate_size": 88}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = EngineConfig(model=str(tmp_path), quantization="int4")
    mesh = jax.make_mesh((num_devices,), ("tensor",), devices=jax.devices()[:num_devices])
    specs = specs_of(tmp_path)
    every = schemes_of(stored_specs(tmp_path, specs, dtype=FLOAT32, quantization="int4"))
    with caplog.at_level("INFO"):
        held = choose_weights(config, config.model, fields, specs, dtype=FLOAT32, kernels="xla", mesh=mesh, is_cpu=True)
    assert every.keys() - schemes_of(held).keys() == floats
    assert ("codes of 1 matrices (mlp.down) are held as floats: on this mesh" in caplog.text) == bool(floats)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_one_device(tmp_path, case):
    path = write_quantized(tmp_path, *CASES[case], is_quantized=lambda name: "_proj" in name)
    assert_tokens(path, 8 if CASES[case][0]["model_type"] == "llama" else 4)


@pytest.mark.slow
@pytest.mark.parametrize("case", EXPERTS)
def test_experts_alone_are_codes(tmp_path, case):
    *what, num_devices = EXPERTS[case]
    path = write_quantized(tmp_path, *what, is_quantized=lambda name: ".experts." in name)
    held = schemes_of(stored_specs(path, specs_of(path), dtype=FLOAT32, quantization=None))
    assert held.keys() == {f"layers.{layer}.mlp.experts.{name}" for layer in (0, 1) for name in ("gate_up", "down")}
    assert_tokens(path, num_devices)


@pytest.mark.slow
def test_experts_of_gpt_oss_in_mxfp4():
    """By default on a CPU, too; here on two devices, which have whole experts."""
    path = next(path for path in GOLDENS if path.name == "gpt_oss_mxfp4")
    expected = naive_tokens(path, None)
    assert len(set().union(*expected)) > 3
    assert greedy_tokens(path, None, 2) == expected
    assert greedy_tokens(path, None, 2, dequantize=True) == expected
