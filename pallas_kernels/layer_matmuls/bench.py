"""Bench rows of the matmuls between two attentions: a layer of Llama 3 8B in one kernel, in four and in XLA's."""

import functools
import itertools
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.layer_matmuls.op import Weights, layer_matmuls
from pallas_kernels.small_matmul import matmul, matmul_then_norm
from pallas_kernels.timing import Row, floor, measure, on_gpu

_EPS = 1e-5
_LAYERS = 6
"""With weights of their own, more than the L2 holds."""
_CALLS = 24
"""In one program: starting one takes as long as a kernel."""


def layer_matmuls_rows() -> Iterator[Row]:
    """A row for each number of rows and implementation; without a GPU, of a small layer in XLA."""
    implementations = ("one kernel", "small_matmul", "xla") if on_gpu() else ("xla",)
    hidden, inner, outputs = (4096, 14336, 6144) if on_gpu() else (256, 896, 384)
    layers = [_weights(hidden, inner, outputs, seed) for seed in range(_LAYERS)]
    gain = _random((hidden,), 0)
    num_bytes = sum(weight.nbytes for weight in layers[0] if weight is not None)
    for num_rows, implementation in itertools.product((1, 4, 8, 16) if on_gpu() else (1, 16), implementations):
        start = _random((num_rows, hidden), 1), _random((num_rows, hidden), 2)
        inputs = [(layers[call % _LAYERS], gain) for call in range(_CALLS)]
        took = measure(functools.partial(_run, implementation=implementation), inputs, carry=start)
        yield Row(f"{num_rows} rows, {hidden} x {inner}", implementation, took, floor(num_bytes=num_bytes))


def _run(
    carry: tuple[jax.Array, jax.Array],
    weights: Weights,
    gain: jax.Array,
    *,
    implementation: Literal["one kernel", "small_matmul", "xla"],
) -> tuple[jax.Array, jax.Array]:
    """A layer after the other: what would be its queries are the next one's heads, by a copy of them."""
    heads, x = carry
    if implementation == "small_matmul":
        x, normed = matmul_then_norm(heads, weights.o, residual=x, gain=gain, eps=_EPS, implementation="sm90")
        inner = matmul(normed, weights.gate_up, activation=jax.nn.silu, implementation="sm90")
        x, normed = matmul_then_norm(inner, weights.down, residual=x, gain=gain, eps=_EPS, implementation="sm90")
        assert weights.qkv is not None
        y = matmul(normed, weights.qkv, implementation="sm90")
    else:
        name = "sm90" if implementation == "one kernel" else "xla"
        gains = gain, gain
        x, y = layer_matmuls(heads, x, weights, gains, activation=jax.nn.silu, eps=_EPS, implementation=name)
    return y[:, : heads.shape[1]], x


def _weights(hidden: int, inner: int, outputs: int, seed: int) -> Weights:
    return Weights(
        o=_random((hidden, hidden), seed),
        gate_up=_random((2, inner, hidden), seed + 100),
        down=_random((hidden, inner), seed + 200),
        qkv=_random((outputs, hidden), seed + 300),
    )


def _random(shape: tuple[int, ...], seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16 if on_gpu() else jnp.float32)
