"""Random matrices stored as formats define them, and what the formats' own packages make of them: tests/quantization.

Runs in a Python with torch and these packages (see make.sh), not in jaxserve's. Each golden is a safetensors file: the
tensors of one module by the last part of their names, and `expected`, the values that they encode.
"""

import argparse
import importlib
import math
import pathlib
import sys
import tempfile
import types

import bitsandbytes.functional as bnb
import gguf
import numpy as np
import safetensors.torch
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

OUTPUTS, INPUTS = 56, 96  # 56 is no multiple of a block, nor of the zero points in a word for 8 outputs a word
COMPRESSED_TENSORS = {
    "float_tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, torch.bfloat16),
    "float_channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, torch.bfloat16),
    "float_block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 64]},
        torch.float32,
    ),
    "int_channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, torch.bfloat16),
    "packed_channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}, torch.float16),
    "packed_group": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, torch.bfloat16),
    "packed_zeros": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        torch.bfloat16,
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        torch.bfloat16,
    ),
    "packed_8_bits": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32}, torch.float16),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        torch.bfloat16,
    ),
}
"""Name: (format, arguments of its weights, dtype of the scales)."""
BITSANDBYTES = {
    "bnb_nf4": {"quant_type": "nf4"},
    "bnb_nf4_nested": {"quant_type": "nf4", "compress_statistics": True},
    "bnb_nf4_float32": {"quant_type": "nf4", "blocksize": 128},
    "bnb_fp4": {"quant_type": "fp4"},
}
GPTQ = {"gptq_v1": (4, "gptq"), "gptq_v2": (4, "gptq_v2"), "gptq_8_bits": (8, "gptq"), "gptq_2_bits": (2, "gptq_v2")}
"""Name: (bits, checkpoint_format)."""
AUTOROUND = {"autoround_v1": "qlinear_torch_zp", "autoround_v2": "qlinear_torch"}
"""Name: module of AutoRound's matrices whose zero points are stored less 1, or as they are."""
GGUF = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where the blocks of a type have numbers of 16 bits; others have one, at their beginning."""


def shape_of_scales(arguments):
    match arguments["strategy"]:
        case "tensor":
            return (1,)
        case "channel":
            return (OUTPUTS, 1)
        case "group" | "tensor_group":
            return (OUTPUTS, INPUTS // arguments["group_size"])
    rows, columns = arguments["block_structure"]
    return (math.ceil(OUTPUTS / rows), math.ceil(INPUTS / columns))


def by_compressed_tensors(name, generator):
    kind, arguments, dtype = COMPRESSED_TENSORS[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments), format=kind)
    shape = shape_of_scales(arguments)
    weights = {
        "weight": torch.randn(OUTPUTS, INPUTS, generator=generator).to(dtype),
        "weight_scale": (0.01 + 0.2 * torch.rand(shape, generator=generator)).to(dtype),
    }
    if arguments.get("symmetric") is False:
        weights["weight_zero_point"] = torch.randint(-8, 8, shape, generator=generator).to(torch.int8)
    if kind.startswith("nvfp4"):
        weights["weight_global_scale"] = 1500 + 1000 * torch.rand(1, generator=generator)
        weights["weight_scale"] = (1 + 300 * torch.rand(shape, generator=generator)).to(dtype)
    compressor = BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(weights, scheme)
    return stored | {"expected": compressor.decompress(stored, scheme)["weight"]}


def by_bitsandbytes(name, generator):
    # Where rows are no whole blocks, what bitsandbytes 0.50.2 computes on a CPU is wrong.
    shape = (OUTPUTS, 128)
    if name == "bnb_int8":
        codes = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
        largest = 0.5 + torch.rand(OUTPUTS, generator=generator)
        stored = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return stored | {"expected": bnb.int8_vectorwise_dequant(codes, largest)}
    dtype = torch.float32 if name.endswith("float32") else torch.bfloat16
    weight = torch.randn(shape, generator=generator).to(dtype)
    codes, state = bnb.quantize_4bit(weight, **BITSANDBYTES[name])
    stored = {f"weight.{leaf}": tensor for leaf, tensor in state.as_dict(packed=True).items()}
    return {"weight": codes} | stored | {"expected": bnb.dequantize_4bit(codes, state)}


def by_gptqmodel(name, generator, folder):
    """GPTQModel as it lies in its source: its package imports much that dequantization does not need."""
    for package in ("", ".utils", ".quantization", ".quantization.awq", ".quantization.awq.utils"):
        module = types.ModuleType(f"gptqmodel{package}")
        module.__path__ = [str(folder.joinpath("gptqmodel", *package.split(".")))]
        module.gte_python_3_13_3 = module.gte_python_3_14 = module.has_gil_disabled = lambda: False
        module.log_gil_requirements_for = lambda *_: None
        sys.modules[module.__name__] = module
    outputs, group = 64, 32  # in whole words

    def words(*shape):
        return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)

    if name == "awq":
        packing = importlib.import_module("gptqmodel.quantization.awq.utils.packing_utils")
        scales = (0.01 + 0.1 * torch.rand(INPUTS // group, outputs, generator=generator)).half()
        stored = {
            "qweight": words(INPUTS, outputs // 8),
            "qzeros": words(INPUTS // group, outputs // 8),
            "scales": scales,
        }
        values = packing.dequantize_gemm(*stored.values(), 4, group)
        return stored | {"expected": values.T.contiguous()}
    bits, label = GPTQ[name]
    per_word = 32 // bits
    # No zero point is stored as the largest number: 1 more, as version 1 has it, is none.
    zeros = torch.randint(0, 2**bits - 1, (INPUTS // group, outputs // per_word, per_word), generator=generator)
    qzeros = (zeros << (torch.arange(per_word) * bits)).sum(-1).to(torch.int32)
    stored = {
        "qweight": words(INPUTS // per_word, outputs),
        "qzeros": qzeros,
        "scales": (0.01 + 0.1 * torch.rand(INPUTS // group, outputs, generator=generator)).half(),
        "g_idx": torch.randperm(INPUTS, generator=generator).to(torch.int32) // group,
    }
    convert = importlib.import_module("gptqmodel.utils.model_dequant").convert_gptq_file
    with tempfile.TemporaryDirectory() as temporary:
        path = pathlib.Path(temporary) / "model.safetensors"
        safetensors.torch.save_file({f"m.{leaf}": tensor for leaf, tensor in stored.items()}, path)
        values = convert(path, torch.float16, {"bits": bits, "checkpoint_format": label}, "cpu")["m.weight"]
    return stored | {"expected": values}


def by_autoround(name, generator):
    group, linear = 32, torch.nn.Linear(INPUTS, 32, bias=False)  # AutoRound has outputs in multiples of 32
    linear.weight.data = torch.randn(32, INPUTS, generator=generator)
    shape = (32, INPUTS // group)
    scales = 0.2 + 0.1 * torch.rand(shape, generator=generator)
    zeros = torch.randint(4, 12, shape, generator=generator)
    # Values beyond the codes would carry into their neighbours.
    low, high = ((edge - zeros) * scales for edge in (0, 15))
    each = linear.weight.data.reshape(32, -1, group)
    linear.weight.data = torch.clamp(each, low[..., None], high[..., None]).reshape(32, INPUTS)
    packing = importlib.import_module(f"auto_round_extension.torch.{AUTOROUND[name]}")
    packed = packing.QuantLinear(4, group, INPUTS, 32, bias=False)
    packed.device = "cpu"
    packed.pack(linear, scales, zeros, device="cpu")
    values = packed(torch.eye(INPUTS, dtype=torch.float16)).T
    return {leaf: getattr(packed, leaf) for leaf in ("qweight", "qzeros", "scales")} | {"expected": values}


def by_gguf(name, generator):
    kind = gguf.GGMLQuantizationType[name.removeprefix("gguf_").upper()]
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = 4
    blocks = torch.randint(0, 256, (rows * 512 // size, num_bytes), generator=generator).to(torch.uint8).numpy()
    if kind.name == "MXFP4":
        blocks[:, 0] = blocks[:, 0] // 8 + 110
    else:
        for offset in HALVES.get(kind.name, (0,)):
            numbers = torch.randn(len(blocks), 1, generator=generator).half().numpy()
            blocks[:, offset : offset + 2] = numbers.view(np.uint8)
    blocks = blocks.reshape(rows, -1)
    expected = gguf.quants.dequantize(blocks, kind)
    return {"blocks": torch.from_numpy(blocks), "expected": torch.from_numpy(expected)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(__file__).parent / "quantized")
    parser.add_argument("--gptqmodel", type=pathlib.Path, required=True, help="folder of GPTQModel's source")
    arguments = parser.parse_args()
    arguments.output.mkdir(exist_ok=True)
    makers = dict.fromkeys(COMPRESSED_TENSORS, by_compressed_tensors)
    makers |= dict.fromkeys([*BITSANDBYTES, "bnb_int8"], by_bitsandbytes)
    makers |= dict.fromkeys([f"gguf_{kind.lower()}" for kind in GGUF], by_gguf)
    makers |= dict.fromkeys([*GPTQ, "awq"], lambda *given: by_gptqmodel(*given, arguments.gptqmodel))
    makers |= dict.fromkeys(AUTOROUND, by_autoround)
    for index, (name, make) in enumerate(makers.items()):
        generator = torch.Generator().manual_seed(1000 * arguments.seed + index)
        tensors = {leaf: tensor.contiguous() for leaf, tensor in make(name, generator).items()}
        safetensors.torch.save_file(tensors, arguments.output / f"{name}.safetensors")
        print(f"{name}: {', '.join(tensors)} -> {tensors['expected'].dtype}")


if __name__ == "__main__":
    main()
