"""Benchmark of `recurrent_chunks`: prompts in a layer of Qwen3-Next and in one of Nemotron-H 8B."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_chunks.op import recurrent_chunks
from pallas_kernels.recurrent_step import Tokens
from pallas_kernels.timing import Row, floor, measure, on_gpu

_SHAPES = {"delta rule": (16, 2, 128, 128), "Mamba-2": (8, 16, 128, 64)}


def recurrent_chunks_rows() -> Iterator[Row]:
    """Yield a row for each rule, division of the tokens into rows, and implementation."""
    num_tokens = 8192 if on_gpu() else 128
    for rule, shape in _SHAPES.items():
        tokens, states = _arrays(num_tokens, shape)
        num_bytes = sum(x.nbytes for x in (*tokens, tokens.v))
        for num_rows in (1, 8, 64) if on_gpu() else (2,):
            slots = jnp.arange(num_rows, dtype=jnp.int32)
            starts = jnp.arange(num_rows + 1, dtype=jnp.int32) * (num_tokens // num_rows)
            rows = slots, starts, jnp.zeros(num_rows, bool), jnp.int32(0), jnp.int32(num_rows)
            for implementation in ("sm90", "xla") if on_gpu() else ("xla",):
                run = functools.partial(recurrent_chunks, corrects=rule == "delta rule", implementation=implementation)
                carry = jnp.copy(states), jnp.zeros_like(tokens.v)
                took = measure(functools.partial(_layer, run), [(tokens, *rows)], carry=carry)
                case = f"{rule}, {num_rows} x {num_tokens // num_rows}"
                yield Row(case, implementation, took, floor(num_bytes=num_bytes))


def _layer(run: Any, carry: Any, tokens: Any, *rows: jax.Array) -> Any:
    """Return states and outputs."""
    out, states = run(tokens, carry[0], *rows)
    return states, out


def _arrays(num_tokens: int, shape: tuple[int, int, int, int]) -> tuple[Tokens, jax.Array]:
    H, G, K, V = shape
    sizes = (H, K), (H, K), (H, G, V), (H, G), (H, G)
    keys = jax.random.split(jax.random.key(0), 6)
    q, k, v, decay, beta = (jax.random.normal(key, (num_tokens, *size)) for key, size in zip(keys, sizes, strict=False))
    norm = functools.partial(jnp.linalg.norm, axis=-1, keepdims=True)
    tokens = Tokens(q / norm(q), k / norm(k), v, -jnp.abs(decay), jax.nn.sigmoid(beta))
    return tokens, jax.random.normal(keys[5], (64, *shape))
