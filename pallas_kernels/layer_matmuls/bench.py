"""Benchmark of a layer of Llama 3 8B: its matmuls in one kernel, in four, in XLA's, and the whole layer in one or
three.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write import rope_and_write_kv
from pallas_kernels.layer_matmuls import Weights, decode_layer, layer_matmuls
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paging import Pages, Scores
from pallas_kernels.small_matmul import matmul, matmul_then_norm
from pallas_kernels.timing import CALLS, LAYERS, OF_LAYER, Row, compare, compare_layers, floor, on_gpu, random_arrays

_BLOCK_SIZE = 16
_CONTEXTS = ((1, 256), (8, 1024), (16, 512), (16, 4096), (1, 32768))
"""Rows and the tokens of each."""


def layer_matmuls_rows() -> Iterator[Row]:
    """Yield a row for each number of rows and implementation; without a GPU, of a small layer in XLA."""
    hidden, inner, outputs = (4096, 14336, 6144) if on_gpu() else (256, 896, 384)
    layers = [_weights(hidden, inner, outputs, seed) for seed in range(LAYERS)]
    calls = {"xla": functools.partial(layer_matmuls, **OF_LAYER)}
    if on_gpu():
        one_kernel = functools.partial(layer_matmuls, **OF_LAYER, implementation="sm90")
        calls = {"one kernel": one_kernel, "small_matmul": _four_kernels, **calls}
    for num_rows in (1, 4, 8, 16, 32, 64) if on_gpu() else (1, 16):
        yield from compare_layers(f"{num_rows} rows, {hidden} x {inner}", num_rows, hidden, layers, calls)


def _four_kernels(
    heads: jax.Array, x: jax.Array, weights: Weights, gains: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    x, normed = matmul_then_norm(heads, weights.o, residual=x, gain=gains[0], eps=1e-5, implementation="sm90")
    inner = matmul(normed, weights.gate_up, activation=jax.nn.silu, implementation="sm90")
    x, normed = matmul_then_norm(inner, weights.down, residual=x, gain=gains[1], eps=1e-5, implementation="sm90")
    assert weights.qkv is not None
    return x, matmul(normed, weights.qkv, implementation="sm90")


def decode_layer_rows() -> Iterator[Row]:
    """Yield a row for each batch and implementation; without a GPU, of a small layer in XLA."""
    calls: dict[str, Callable[..., Any]] = {"xla": functools.partial(decode_layer, implementation="xla")}
    if on_gpu():
        calls = {"one kernel": functools.partial(decode_layer, implementation="sm90"), "three kernels": _three_kernels}
    head_dim, num_kv_heads, queries = (128, 8, 4) if on_gpu() else (64, 2, 2)
    hidden, inner = (4096, 14336) if on_gpu() else (256, 896)
    members = queries + 2
    layers = [_weights(hidden, inner, num_kv_heads * members * head_dim, seed) for seed in range(LAYERS)]
    [gain] = random_arrays(0, (hidden,))
    for num_rows, seq_len in _CONTEXTS if on_gpu() else ((2, 40),):
        pages_per_row = -(-seq_len // _BLOCK_SIZE)
        pages = jax.random.permutation(jax.random.key(0), num_rows * pages_per_row).reshape(num_rows, -1)
        of_rows = {
            "rotation": (jnp.ones((num_rows, head_dim // 2)), jnp.zeros((num_rows, head_dim // 2))),
            "write_index": pages[:, -1] * _BLOCK_SIZE + (seq_len - 1) % _BLOCK_SIZE,
            "block_tables": pages,
            "seq_lens": jnp.full(num_rows, seq_len),
        }
        pool = num_rows * pages_per_row, num_kv_heads, _BLOCK_SIZE, head_dim
        shapes = (num_rows, num_kv_heads, members, head_dim), (num_rows, hidden), pool, pool
        qkv, x, k, v = random_arrays(1, *shapes)
        num_bytes = sum(weight.nbytes for weight in layers[0] if weight is not None)
        num_bytes += 2 * num_rows * seq_len * num_kv_heads * head_dim * k.itemsize
        inputs = [(layers[call % LAYERS], gain) for call in range(CALLS)]
        options = of_rows | {"scale": head_dim**-0.5} | OF_LAYER
        runs = {name: functools.partial(_run_layer, call, options) for name, call in calls.items()}
        case, bound = f"{num_rows} rows of {seq_len}", floor(num_bytes=num_bytes)
        yield from compare(case, runs, inputs, carry=(qkv, x, Pages(k, v)), bound=bound)


def _run_layer(
    layer: Callable[..., Any], options: dict[str, Any], carry: Any, weights: Weights, gain: jax.Array
) -> tuple[jax.Array, jax.Array, Pages]:
    """Run one layer on the previous one's results: qkv, the residual stream and the pools."""
    qkv, x, pages = carry
    x, y, pages = layer(qkv, pages, x, weights, (gain, gain), **options)
    return y.reshape(qkv.shape), x, pages


def _three_kernels(
    qkv: jax.Array,
    pages: Pages,
    x: jax.Array,
    weights: Weights,
    gains: tuple[jax.Array, jax.Array],
    *,
    rotation: tuple[jax.Array, jax.Array],
    write_index: jax.Array,
    scale: float,
    activation: Callable[[jax.Array], jax.Array],
    eps: float,
    **contexts: Any,
) -> tuple[jax.Array, jax.Array, Pages]:
    """Compute what `decode_layer` does."""
    q, pages = rope_and_write_kv(qkv, pages, write_index, rotation=rotation, implementation="sm90")
    heads, _ = paged_attention(q[:, None], pages, **contexts, scores=Scores(scale=scale), implementation="sm90")
    heads = heads.reshape(len(q), -1)
    x, y = layer_matmuls(heads, x, weights, gains, activation=activation, eps=eps, implementation="sm90")
    return x, y, pages


def _weights(hidden: int, inner: int, outputs: int, seed: int) -> Weights:
    return Weights(*random_arrays(seed, (hidden, hidden), (2, inner, hidden), (hidden, inner), (outputs, hidden)))
