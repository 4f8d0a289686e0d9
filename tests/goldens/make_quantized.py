"""Random matrices stored by the packages that define formats, and what these packages make of them: tests/quantization.

Runs in a Python with torch and compressed-tensors (see make.sh), not in jaxserve's. Each golden is a safetensors file:
the tensors of one module by the last part of their names, and `expected`, the values that they stand for.
"""

import argparse
import math
import pathlib

import safetensors.torch
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

OUTPUTS, INPUTS = 56, 96  # 56 is no multiple of a block, nor of the zero points in a word for 8 outputs a word
CASES = {
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
}
"""Name: (format, arguments of its weights, dtype of the scales)."""


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


def make_golden(path, name, seed):
    kind, arguments, dtype = CASES[name]
    generator = torch.Generator().manual_seed(1000 * seed + list(CASES).index(name))
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
    expected = compressor.decompress(stored, scheme)["weight"]
    tensors = {key: tensor.contiguous() for key, tensor in (stored | {"expected": expected}).items()}
    safetensors.torch.save_file(tensors, path / f"{name}.safetensors")
    print(f"{name}: {', '.join(stored)} -> {expected.dtype}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(__file__).parent / "quantized")
    arguments = parser.parse_args()
    arguments.output.mkdir(exist_ok=True)
    for name in CASES:
        make_golden(arguments.output, name, arguments.seed)


if __name__ == "__main__":
    main()
