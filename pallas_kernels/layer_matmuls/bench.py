"""Benchmark of a layer of Llama 3 8B: its matmuls in one kernel, in four, in XLA's, and the whole layer in one or
three.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write import rope_and_write_kv
from pallas_kernels.layer_matmuls.op import Weights, decode_layer, layer_matmuls
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paging import Pages, Scores
from pallas_kernels.small_matmul import matmul, matmul_then_norm
from pallas_kernels.timing import Row, floor, measure, on_gpu

_EPS = 1e-5
_LAYERS = 6
"""With weights of their own, more than the L2 holds."""
_CALLS = 24
"""Calls per program, since launching a program takes as long as a kernel."""
_BLOCK_SIZE = 16
_CONTEXTS = ((1, 256), (8, 1024), (16, 512), (16, 4096), (1, 32768))
"""Rows and the tokens of each."""


def layer_matmuls_rows() -> Iterator[Row]:
    """Yield a row for each number of rows and implementation; without a GPU, of a small layer in XLA."""
    implementations = ("one kernel", "small_matmul", "xla") if on_gpu() else ("xla",)
    hidden, inner, outputs = (4096, 14336, 6144) if on_gpu() else (256, 896, 384)
    layers = [_weights(hidden, inner, outputs, seed) for seed in range(_LAYERS)]
    gain = _random((hidden,), 0)
    num_bytes = sum(weight.nbytes for weight in layers[0] if weight is not None)
    for num_rows, implementation in itertools.product((1, 4, 8, 16, 32, 64) if on_gpu() else (1, 16), implementations):
        start = _random((num_rows, hidden), 1), _random((num_rows, hidden), 2)
        inputs = [(layers[call % _LAYERS], gain) for call in range(_CALLS)]
        took = measure(functools.partial(_run, implementation=implementation), inputs, carry=start)
        yield Row(f"{num_rows} rows, {hidden} x {inner}", implementation, took, floor(num_bytes=num_bytes))


def decode_layer_rows() -> Iterator[Row]:
    """Yield a row for each batch and implementation; without a GPU, of a small layer in XLA."""
    implementations = ("one kernel", "three kernels") if on_gpu() else ("xla",)
    head_dim, num_kv_heads, queries = (128, 8, 4) if on_gpu() else (64, 2, 2)
    hidden, inner = (4096, 14336) if on_gpu() else (256, 896)
    members = queries + 2
    layers = [_weights(hidden, inner, num_kv_heads * members * head_dim, seed) for seed in range(_LAYERS)]
    gain = _random((hidden,), 0)
    for (num_rows, seq_len), implementation in itertools.product(
        _CONTEXTS if on_gpu() else ((2, 40),), implementations
    ):
        pages_per_row = -(-seq_len // _BLOCK_SIZE)
        pages = jax.random.permutation(jax.random.key(0), num_rows * pages_per_row).reshape(num_rows, -1)
        of_rows = {
            "rotation": (jnp.ones((num_rows, head_dim // 2)), jnp.zeros((num_rows, head_dim // 2))),
            "write_index": pages[:, -1] * _BLOCK_SIZE + (seq_len - 1) % _BLOCK_SIZE,
            "block_tables": pages,
            "seq_lens": jnp.full(num_rows, seq_len),
        }
        pool = num_rows * pages_per_row, num_kv_heads, _BLOCK_SIZE, head_dim
        start = (
            _random((num_rows, num_kv_heads, members, head_dim), 1),
            _random((num_rows, hidden), 2),
            Pages(_random(pool, 3), _random(pool, 4)),
        )
        num_bytes = sum(weight.nbytes for weight in layers[0] if weight is not None)
        num_bytes += 2 * num_rows * seq_len * num_kv_heads * head_dim * start[0].itemsize
        inputs = [(layers[call % _LAYERS], gain) for call in range(_CALLS)]
        run = functools.partial(_run_layer, of_rows=of_rows, implementation=implementation)  # of one plan
        took = measure(run, inputs, carry=start)
        yield Row(f"{num_rows} rows of {seq_len}", implementation, took, floor(num_bytes=num_bytes))


def _run_layer(
    carry: tuple[jax.Array, jax.Array, Pages],
    weights: Weights,
    gain: jax.Array,
    *,
    of_rows: dict[str, Any],
    implementation: Literal["one kernel", "three kernels", "xla"],
) -> tuple[jax.Array, jax.Array, Pages]:
    """Run one layer on the previous one's results: qkv, the residual stream and the pools."""
    qkv, x, pages = carry
    name = "xla" if implementation == "xla" else "sm90"
    scale, gains = qkv.shape[-1] ** -0.5, (gain, gain)
    of_layer = {"activation": jax.nn.silu, "eps": _EPS}
    if implementation == "one kernel":
        x, y, pages = decode_layer(
            qkv, pages, x, weights, gains, **of_rows, scale=scale, **of_layer, implementation=name
        )
    else:
        q, pages = rope_and_write_kv(
            qkv, pages, of_rows["write_index"], rotation=of_rows["rotation"], implementation=name
        )
        contexts = {key: of_rows[key] for key in ("block_tables", "seq_lens")}
        heads, _ = paged_attention(q[:, None], pages, **contexts, scores=Scores(scale=scale), implementation=name)
        x, y = layer_matmuls(heads.reshape(len(q), -1), x, weights, gains, **of_layer, implementation=name)
    return y.reshape(qkv.shape), x, pages


def _run(
    carry: tuple[jax.Array, jax.Array],
    weights: Weights,
    gain: jax.Array,
    *,
    implementation: Literal["one kernel", "small_matmul", "xla"],
) -> tuple[jax.Array, jax.Array]:
    """Run one layer on the previous one's results, with a copy of its queries as the heads."""
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
