"""Benchmark of the gated linear unit of a Llama-3-8B layer, for the rows of prefill and of large decode steps."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.gated_linear_unit.op import Implementation, gated_linear_unit
from pallas_kernels.timing import Row, floor, measure, num_rotations, on_gpu


def gated_linear_unit_rows() -> Iterator[Row]:
    """Yield a row for each number of rows and implementation."""
    outputs, depth, dtype = (14_336, 4096, jnp.bfloat16) if on_gpu() else (896, 256, jnp.float32)
    implementations: tuple[Implementation, ...] = ("sm90", "xla") if on_gpu() else ("xla",)
    num_weights = 2 * outputs * depth
    for num_rows in (128, 256, 512, 2048, 8192) if on_gpu() else (256,):
        inputs = [
            (
                jax.random.normal(jax.random.key(2 * call), (num_rows, depth), dtype),
                jax.random.normal(jax.random.key(2 * call + 1), (2, outputs, depth), dtype) * dtype(depth**-0.5),
            )
            for call in range(num_rotations(2 * num_weights))
        ]
        bound = floor(num_bytes=2 * num_weights, flops=2.0 * num_rows * num_weights)
        for implementation in implementations:
            call = functools.partial(gated_linear_unit, activation=jax.nn.silu, implementation=implementation)
            case = f"{num_rows} rows, 2 x {outputs} x {depth}, SiLU"
            yield Row(case, implementation, measure(call, inputs, repeats=5), bound)
