"""Experts that an engine holds as codes: its tokens are those of float32 forward passes with the dequantized values."""

import functools

import pytest
import stored_matrices as stored
from golden_models import GOLDENS
from quantized_models import FIELDS, FLOAT32, greedy_tokens, naive_tokens, specs_of, write_quantized

from jaxserve.layers.layouts import schemes_of
from jaxserve.loading.weights import stored_specs

QWEN = FIELDS | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MIXTRAL = FIELDS | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


def compressed(format_name, kind, bits):
    group = {"format": format_name, "targets": ["Linear"], "weights": {"num_bits": bits, "type": kind}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
CASES = {
    "fp8 of blocks": (QWEN, BLOCKS, functools.partial(stored.fp8, scheme="block", block=(32, 32))),
    "fp8 of channels": (
        MIXTRAL,
        compressed("float-quantized", "float", 8),
        functools.partial(stored.fp8, scheme="channel"),
    ),
    "packed": (QWEN, compressed("pack-quantized", "int", 4), functools.partial(stored.packed, group=16)),
    "gptq": (QWEN, GPTQ, functools.partial(stored.gptq, group=16, is_symmetric=True)),
    "awq": (MIXTRAL, AWQ, functools.partial(stored.awq, group=16)),
}


def is_expert(name):
    return ".experts." in name


# On several devices one whose scales belong to groups of inputs, and one with a scale for each output.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "num_devices"),
    [("fp8 of blocks", 1), ("packed", 1), ("awq", 1), ("gptq", 4), ("fp8 of channels", 4)],
)
def test_tokens_are_those_of_the_dequantized_values(tmp_path, case, num_devices):
    path = write_quantized(tmp_path, *CASES[case], is_quantized=is_expert)
    held = schemes_of(stored_specs(path, specs_of(path), dtype=FLOAT32, quantization=None))
    assert held.keys() == {f"layers.{layer}.mlp.experts.{name}" for layer in (0, 1) for name in ("gate_up", "down")}
    expected = naive_tokens(path, None)
    assert len(set().union(*expected)) > 5
    assert greedy_tokens(path, None, num_devices, dequantize=False) == expected


@pytest.mark.slow
def test_experts_of_gpt_oss_in_mxfp4():
    """By default on a CPU, too; here on two devices, which have whole experts."""
    path = next(path for path in GOLDENS if path.name == "gpt_oss_mxfp4")
    expected = naive_tokens(path, None)
    assert len(set().union(*expected)) > 3
    assert greedy_tokens(path, None, 2) == expected
    assert greedy_tokens(path, None, 2, dequantize=True) == expected
