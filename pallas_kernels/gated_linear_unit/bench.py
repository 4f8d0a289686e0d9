"""Benchmark of the gated linear unit of a Llama-3-8B layer, for the rows of prefill and of large decode steps."""

from collections.abc import Iterator

import jax

from pallas_kernels.gated_linear_unit.op import gated_linear_unit
from pallas_kernels.timing import Row, compare, floor, num_rotations, on_gpu, ours, random_arrays


def gated_linear_unit_rows() -> Iterator[Row]:
    """Yield a row for each number of rows and implementation."""
    outputs, depth = (14_336, 4096) if on_gpu() else (896, 256)
    num_weights = 2 * outputs * depth
    for num_rows in (128, 256, 512, 2048, 8192) if on_gpu() else (256,):
        seeds = range(num_rotations(2 * num_weights))
        arrays = [random_arrays(seed, (num_rows, depth), (2, outputs, depth)) for seed in seeds]
        inputs = [(x, weight * weight.dtype.type(depth**-0.5)) for x, weight in arrays]
        bound = floor(num_bytes=2 * num_weights, flops=2.0 * num_rows * num_weights)
        case = f"{num_rows} rows, 2 x {outputs} x {depth}, SiLU"
        yield from compare(case, ours(gated_linear_unit, activation=jax.nn.silu), inputs, bound=bound)
