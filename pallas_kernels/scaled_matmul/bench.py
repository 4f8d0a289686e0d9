"""Bench rows of matmuls of 8-bit rows and weights: those of a layer of Llama 3 8B that are largest, in both forms."""

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmuls import Code, QuantizedMatrix
from pallas_kernels.scaled_matmul.op import CODES, Implementation, scaled_matmul
from pallas_kernels.timing import Row, floor, measure, num_rotations, on_gpu

_FORMATS: tuple[tuple[Code, int | None, tuple[Implementation, ...]], ...] = (
    ("fp8", None, ("xla", "sm90")),
    ("fp8", 128, ("sm90",)),
    ("int8", None, ("sm90",)),
)


def scaled_matmul_rows() -> Iterator[Row]:
    """Yield a row for each number of rows, format and implementation; times include the quantization of rows."""
    outputs, depth = (14_336, 4096) if on_gpu() else (256, 256)
    num_weights = 2 * outputs * depth
    for num_rows, (code, group, implementations) in itertools.product(
        (256, 1024, 8192) if on_gpu() else (128,), _FORMATS
    ):
        inputs = [
            (
                jax.random.normal(jax.random.key(2 * call), (num_rows, depth), jnp.bfloat16),
                _matrix(jax.random.key(2 * call + 1), outputs, depth, code, group),
            )
            for call in range(num_rotations(num_weights))
        ]
        # Tensor cores multiply 8 bits twice as fast.
        bound = floor(num_bytes=num_weights, flops=1.0 * num_rows * num_weights)
        for implementation in implementations:
            if implementation == "sm90" and not on_gpu():
                continue
            call = functools.partial(scaled_matmul, activation=jax.nn.silu, implementation=implementation)
            name = code if group is None else f"{code}, groups of {group}"
            yield Row(f"{num_rows} rows, 2 x {outputs} x {depth}, {name}", implementation, measure(call, inputs), bound)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _matrix(key: jax.Array, outputs: int, depth: int, code: Code, group: int | None) -> QuantizedMatrix:
    values = jax.random.normal(key, (2, outputs, depth), jnp.float32)
    scales = jnp.full((2, outputs, depth // group if group else 1), depth**-0.5, jnp.float32)
    if code == "int8":
        values, scales = jnp.round(values * 32), scales / 32
    return QuantizedMatrix(codes=values.astype(CODES[code]), scales=scales, code=code)
