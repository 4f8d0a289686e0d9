"""Bench rows of matmuls of 8-bit rows and weights: those of a layer of Llama 3 8B that are largest, in both forms."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import row_quantization
from pallas_kernels.quantized_matmuls import Code, QuantizedMatrix, QuantizedWeights, quantized_layer_matmuls
from pallas_kernels.row_quantization import (
    CODES,
    QuantizedRows,
    UnscaledProduct,
    add_rms_norm_and_quantize,
    quantize_rows,
)
from pallas_kernels.scaled_matmul.op import Implementation, gated_matmul_and_quantize, scaled_matmul, unscaled_matmul
from pallas_kernels.timing import Row, floor, measure, num_rotations, on_gpu

_FORMATS: tuple[tuple[Code, int | None, tuple[Implementation, ...]], ...] = (
    ("fp8", None, ("xla", "sm90")),
    ("fp8", 128, ("sm90",)),
    ("int8", None, ("sm90",)),
)

_EPS = 1e-5
_LAYERS = 6
"""With weights of their own, more than the L2 holds."""
_CALLS = 24
"""Layers per program, since launching a program takes as long as a kernel."""


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
                _matrix(jax.random.key(2 * call + 1), (2, outputs), depth, code, group),
            )
            for call in range(num_rotations(num_weights))
        ]
        # Tensor cores multiply 8 bits twice as fast.
        bound = floor(num_bytes=num_weights, flops=1.0 * num_rows * num_weights)
        for implementation in implementations:
            if implementation == "sm90" and not on_gpu():
                continue

            def call(
                x: jax.Array, weight: QuantizedMatrix, implementation: Implementation = implementation
            ) -> jax.Array:
                rows = quantize_rows(x, weight.code, implementation=_rounding())
                return scaled_matmul(rows, weight, activation=jax.nn.silu, implementation=implementation)

            name = code if group is None else f"{code}, groups of {group}"
            yield Row(f"{num_rows} rows, 2 x {outputs} x {depth}, {name}", implementation, measure(call, inputs), bound)


def rounded_layer_rows() -> Iterator[Row]:
    """Yield two rows for each number of rows: the matmuls and norms of a layer with fp8 weights, with rows as they are
    and with rows rounded to 8 bits. They say from how many rows on rounding is worth it.
    """
    hidden, inner, outputs = (4096, 14_336, 6144) if on_gpu() else (256, 512, 384)
    layers = [
        QuantizedWeights(
            o=_matrix(jax.random.key(seed), (hidden,), hidden, "fp8", None),
            gate_up=_matrix(jax.random.key(seed + 100), (2, inner), hidden, "fp8", None),
            down=_matrix(jax.random.key(seed + 200), (hidden,), inner, "fp8", None),
            qkv=_matrix(jax.random.key(seed + 300), (outputs,), hidden, "fp8", None),
        )
        for seed in range(_LAYERS)
    ]
    dtype = jnp.bfloat16 if on_gpu() else jnp.float32
    gain, num_bytes = jnp.ones(hidden, dtype), sum(array.nbytes for array in jax.tree.leaves(layers[0]))
    as_they_are = functools.partial(
        quantized_layer_matmuls, activation=jax.nn.silu, eps=_EPS, implementation="sm90" if on_gpu() else "xla"
    )
    for num_rows in (32, 64, 128, 256) if on_gpu() else (16,):
        inputs = [(layers[call % _LAYERS], gain) for call in range(_CALLS)]
        bound = floor(num_bytes=num_bytes)
        for name, layer in (("rows of 16 bits", as_they_are), ("rows of 8 bits", _rounded_layer)):
            if num_rows <= 64 or layer is _rounded_layer:
                start = tuple(jax.random.normal(jax.random.key(seed), (num_rows, hidden), dtype) for seed in range(2))
                took = measure(functools.partial(_run, layer), inputs, carry=start)
                yield Row(f"{num_rows} rows, {hidden} x {inner}, fp8", name, took, bound)


def _run(
    layer: Callable[..., Any], carry: tuple[jax.Array, jax.Array], weights: QuantizedWeights, gain: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Run a layer after the other: what would be its queries are the next one's heads, by a copy of them."""
    heads, x = carry
    x, y = layer(heads, x, weights, (gain, gain))
    return y[:, : heads.shape[1]], x


def _rounded_layer(
    heads: jax.Array, x: jax.Array, weights: QuantizedWeights, gains: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    rounding = _rounding()
    assert weights.qkv is not None

    def add_norm(x: jax.Array, update: UnscaledProduct, gain: jax.Array) -> tuple[jax.Array, QuantizedRows]:
        return add_rms_norm_and_quantize(x, update, gain, "fp8", eps=_EPS, implementation=rounding)

    update = unscaled_matmul(quantize_rows(heads, "fp8", implementation=rounding), weights.o)
    x, normed = add_norm(x, update, gains[0])
    inner = gated_matmul_and_quantize(normed, weights.gate_up, "fp8", activation=jax.nn.silu, rounding=rounding)
    x, normed = add_norm(x, unscaled_matmul(inner, weights.down), gains[1])
    return x, scaled_matmul(normed, weights.qkv)


def _rounding() -> row_quantization.Implementation:
    return "sm90" if on_gpu() else "xla"


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _matrix(key: jax.Array, outputs: tuple[int, ...], depth: int, code: Code, group: int | None) -> QuantizedMatrix:
    values = jax.random.normal(key, (*outputs, depth), jnp.float32)
    scales = jnp.full((*outputs, depth // group if group else 1), depth**-0.5, jnp.float32)
    if code == "int8":
        values, scales = jnp.round(values * 32), scales / 32
    return QuantizedMatrix(codes=values.astype(CODES[code]), scales=scales, code=code)
