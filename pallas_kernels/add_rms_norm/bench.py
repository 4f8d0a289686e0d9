"""Benchmark of `add_rms_norm`: between the blocks of a Llama-3-8B layer, in decode steps and in a prefill."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.add_rms_norm.op import add_rms_norm
from pallas_kernels.timing import Row, floor, measure, num_rotations, on_gpu


def add_rms_norm_rows() -> Iterator[Row]:
    """Yield a row for each number of tokens and implementation."""
    size = 4096 if on_gpu() else 512
    for num_tokens in (1, 16, 64, 256, 8192) if on_gpu() else (1, 64):
        num_bytes = num_tokens * size * 2 * 4
        inputs = [_arrays(num_tokens, size, seed) for seed in range(num_rotations(num_bytes))]
        for implementation in ("sm90", "xla") if on_gpu() else ("xla",):
            call = functools.partial(add_rms_norm, eps=1e-5, implementation=implementation)
            yield Row(f"{num_tokens} x {size}", implementation, measure(call, inputs), floor(num_bytes=num_bytes))


def _arrays(num_tokens: int, size: int, seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, update, weight = jax.random.split(jax.random.key(seed), 3)
    return (
        jax.random.normal(x, (num_tokens, size), jnp.bfloat16),
        jax.random.normal(update, (num_tokens, size), jnp.bfloat16),
        jax.random.normal(weight, (size,), jnp.bfloat16),
    )
