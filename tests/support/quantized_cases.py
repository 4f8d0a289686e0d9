"""Quantized checkpoints of every format: a config, and how random matrices are packed; and Llamas of such matrices."""

import functools
import json
import shutil

import jax
import numpy as np
import stored_matrices as stored
from golden_models import GOLDENS

from jaxserve.models import get_family

LLAMA = next(path for path in GOLDENS if path.name == "llama_untied")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}


def group(format_name, *, kind="int", bits=4, **weights):
    return {"format": format_name, "targets": ["Linear"], "weights": {"num_bits": bits, "type": kind} | weights}


def compressed(*groups):
    named = {f"group_{index}": each for index, each in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, "ignore": ["lm_head"]}


BLOCK = (24, 40)  # neither divides a matrix
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}
AUTOROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 8, "sym": True, "data_type": "int"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FLOAT = group("float-quantized", kind="float", bits=8)
MXFP8 = functools.partial(stored.fp8, scheme="runs", dtype=stored.E8M0, block=(1, 32), as_bytes=True)
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
    "fp8 of GPTQModel": (
        {"quant_method": "fp8", "weight_scale_method": "row", "weight_scale_semantics": "inverse"},
        functools.partial(stored.fp8, scheme="flat", leaf="weight_scale_inv", divides=True),
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
    "nvfp4 of modelopt, activations as they are": (
        {"producer": {"name": "modelopt"}, "quant_algo": "W4A16_NVFP4"},
        functools.partial(stored.nvfp4, package="modelopt"),
    ),
    "mxfp8 of modelopt": ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, MXFP8),
    "mxfp8": (compressed(group("mxfp8-quantized", kind="float", bits=8, group_size=32)), MXFP8),
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
    "autoround": (
        AUTOROUND | {"packing_format": "auto_round:auto_gptq"},
        functools.partial(stored.gptq, is_symmetric=True, has_groups=False),
    ),
    "autoround with groups": (
        AUTOROUND | {"sym": False, "packing_format": "auto_round:auto_gptq"},
        stored.gptq,
    ),
    "autoround, zero points as they are": (
        AUTOROUND
        | {
            "sym": False,
            "packing_format": "auto_round",
            "extra_config": {
                r".*\.v_proj.*": {"bits": 8, "group_size": 16},
                "model.layers.0.mlp.down_proj": {"sym": True, "group_size": 96},
                "model.layers.1.mlp.down_proj": {"sym": True, "group_size": -1},
                r".*mlp\.down_proj$": {"bits": 2},
            },
        },
        stored.by_name(
            other=functools.partial(stored.gptq, version=2, has_groups=False),
            v_proj=functools.partial(stored.gptq, version=2, has_groups=False, bits=8, group=16),
            down_proj=functools.partial(stored.gptq, version=2, has_groups=False, is_symmetric=True, group=96),
        ),
    ),
    "autoround, last groups are smaller": (
        AUTOROUND | {"group_size": 40},
        functools.partial(stored.gptq, is_symmetric=True, has_groups=False, group=40),
    ),
    "autoround of AWQ": (AUTOROUND | {"sym": False, "packing_format": "auto_round:auto_awq"}, stored.awq),
    "nf4": (NF4, stored.bitsandbytes),
    "nf4 nested": (NF4, functools.partial(stored.bitsandbytes, nested=True, dtype="float32")),
    "nf4 in blocks across rows": (NF4, functools.partial(stored.bitsandbytes, block=256)),
    "fp4": (NF4 | {"bnb_4bit_quant_type": "fp4"}, functools.partial(stored.bitsandbytes, kind="fp4")),
    "llm.int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, stored.llm_int8),
}


def is_linear(name):
    return name.endswith("_proj.weight")


def write_models(folder, config, make):
    """Write and return (a Llama whose matrices are quantized, the same with the floats that they encode)."""
    fields = json.loads((LLAMA / "config.json").read_text()) | SIZES
    family = get_family(fields)
    rng = np.random.default_rng(7)
    quantized, floats = {}, {}
    for spec in jax.tree.leaves(family.param_specs(family.config(fields))):
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
