"""Benchmark of the four matmuls of a layer of Llama 3 8B with quantized weights, in one kernel and in XLA's."""

import functools
from collections.abc import Iterator

from pallas_kernels.device.codes import Code
from pallas_kernels.inputs import random_weights
from pallas_kernels.quantized_matmuls.op import quantized_layer_matmuls
from pallas_kernels.timing import LAYERS, OF_LAYER, Row, compare_layers, on_gpu

_FORMATS: dict[str, tuple[Code, int | None]] = {
    "int4, groups of 128": ("int4", 128),
    "e2m1, groups of 32": ("e2m1", 32),
    "NVFP4": ("e2m1", 16),
    "NF4": ("nf4", 64),
    "Q4_K": ("uint4", 32),
    "Q6_K": ("int8", 16),
    "fp8": ("fp8", None),
    "fp8, groups of 128": ("fp8", 128),
    "int8": ("int8", None),
}


def quantized_matmuls_rows() -> Iterator[Row]:
    """Yield a row for each format and number of rows; without a GPU, of a small layer in XLA."""
    sizes = (4096, 14336, 6144) if on_gpu() else (256, 1024, 384)
    name = "sm90" if on_gpu() else "xla"
    calls = {name: functools.partial(quantized_layer_matmuls, **OF_LAYER, implementation=name)}
    for format_, (code, group) in _FORMATS.items():
        layers = [random_weights(sizes, code, group, seed) for seed in range(LAYERS)]
        for num_rows in (1, 8, 16, 32, 64) if on_gpu() else (1,):
            case = f"{num_rows} rows, {sizes[0]} x {sizes[1]}, {format_}"
            yield from compare_layers(case, num_rows, sizes[0], layers, calls)
