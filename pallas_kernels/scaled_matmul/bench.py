"""Bench rows of matmuls of 8-bit rows and weights: those of a layer of Llama 3 8B that are largest, in both forms."""

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.implementation import Implementation
from pallas_kernels.inputs import random_matrix, random_weights
from pallas_kernels.layer_matmuls import Weights
from pallas_kernels.quantized_matmuls import Code, QuantizedMatrix, quantized_layer_matmuls
from pallas_kernels.row_quantization import (
    QuantizedRows,
    UnscaledProduct,
    add_rms_norm_and_quantize,
    quantize_rows,
)
from pallas_kernels.scaled_matmul.op import gated_matmul_and_quantize, scaled_matmul, unscaled_matmul
from pallas_kernels.timing import (
    LAYERS,
    OF_LAYER,
    Row,
    compare,
    compare_layers,
    floor,
    num_rotations,
    on_gpu,
)

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
                random_matrix(jax.random.key(2 * call + 1), (2, outputs), depth, code, group),
            )
            for call in range(num_rotations(num_weights))
        ]
        # Tensor cores multiply 8 bits twice as fast.
        bound = floor(num_bytes=num_weights, flops=1.0 * num_rows * num_weights)
        calls = {
            name: functools.partial(_round_and_multiply, implementation=name)
            for name in implementations
            if on_gpu() or name == "xla"
        }
        name = code if group is None else f"{code}, groups of {group}"
        yield from compare(f"{num_rows} rows, 2 x {outputs} x {depth}, {name}", calls, inputs, bound=bound)


def _round_and_multiply(x: jax.Array, weight: QuantizedMatrix, *, implementation: Implementation) -> jax.Array:
    rows = quantize_rows(x, weight.code, implementation=_rounding())
    return scaled_matmul(rows, weight, activation=jax.nn.silu, implementation=implementation)


def rounded_layer_rows() -> Iterator[Row]:
    """Yield two rows for each number of rows: the matmuls and norms of a layer with fp8 weights, with rows as they are
    and with rows rounded to 8 bits. They say from how many rows on rounding is worth it.
    """
    hidden, inner, outputs = (4096, 14_336, 6144) if on_gpu() else (256, 512, 384)
    layers = [random_weights((hidden, inner, outputs), "fp8", None, seed) for seed in range(LAYERS)]
    as_they_are = functools.partial(quantized_layer_matmuls, **OF_LAYER, implementation="sm90" if on_gpu() else "xla")
    for num_rows in (32, 64, 128, 256) if on_gpu() else (16,):
        calls = {"rows of 8 bits": _rounded_layer}
        if num_rows <= 64:
            calls = {"rows of 16 bits": as_they_are, **calls}
        yield from compare_layers(f"{num_rows} rows, {hidden} x {inner}, fp8", num_rows, hidden, layers, calls)


def _rounded_layer(
    heads: jax.Array, x: jax.Array, weights: Weights, gains: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    rounding = _rounding()
    assert weights.qkv is not None

    def add_norm(x: jax.Array, update: UnscaledProduct, gain: jax.Array) -> tuple[jax.Array, QuantizedRows]:
        return add_rms_norm_and_quantize(x, update, gain, "fp8", eps=1e-5, implementation=rounding)

    update = unscaled_matmul(quantize_rows(heads, "fp8", implementation=rounding), weights.o)
    x, normed = add_norm(x, update, gains[0])
    inner = gated_matmul_and_quantize(normed, weights.gate_up, "fp8", activation=jax.nn.silu, rounding=rounding)
    x, normed = add_norm(x, unscaled_matmul(inner, weights.down), gains[1])
    return x, scaled_matmul(normed, weights.qkv)


def _rounding() -> Implementation:
    return "sm90" if on_gpu() else "xla"
