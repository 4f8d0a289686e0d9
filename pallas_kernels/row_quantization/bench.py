"""Benchmark of what stands between the matmuls of 8 bits of a Llama-3-8B layer: rounding, alone and behind a norm or a
gate.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.row_quantization.op import add_rms_norm_and_quantize, gate_and_quantize, quantize_rows
from pallas_kernels.row_quantization.rounding import UnscaledProduct
from pallas_kernels.timing import Row, compare, floor, num_rotations, on_gpu, ours, random_arrays


def _normed(x: jax.Array, sums: jax.Array, **options: Any) -> Any:
    return add_rms_norm_and_quantize(x, _unscaled(sums), x[0], eps=1e-5, **options)


def _gated(sums: jax.Array, **options: Any) -> Any:
    return gate_and_quantize(_unscaled(sums), activation=jax.nn.silu, **options)


def _unscaled(sums: jax.Array) -> UnscaledProduct:
    num_rows, num_outputs = sums.shape
    ones = jnp.ones(num_rows), jnp.ones(num_outputs)
    return UnscaledProduct(sums=sums, row_scales=ones[0], output_scales=ones[1], dtype=sums.dtype)


def row_quantization_rows() -> Iterator[Row]:
    """Yield a row for each operation, number of rows and implementation."""
    size, inner = (4096, 14_336) if on_gpu() else (256, 512)
    # Name, operation, bytes and columns of a row, arrays of rows.
    cases: tuple[tuple[str, Callable[..., Any], int, int, int], ...] = (
        ("rounding", quantize_rows, 3 * size, size, 1),
        ("rounding", quantize_rows, 3 * inner, inner, 1),
        ("scales, addition, norm, rounding", _normed, 7 * size, size, 2),
        ("scales, gate, rounding", _gated, 5 * inner, 2 * inner, 1),
    )
    for (name, operation, bytes_per_row, columns, arrays), num_rows in itertools.product(
        cases, (64, 256, 8192) if on_gpu() else (64,)
    ):
        num_bytes, shapes = num_rows * bytes_per_row, ((num_rows, columns),) * arrays
        inputs = [random_arrays(seed, *shapes) for seed in range(num_rotations(num_bytes))]
        case, bound = f"{name}, {num_rows} x {columns}", floor(num_bytes=num_bytes)
        yield from compare(case, ours(operation, code="fp8"), inputs, bound=bound)
