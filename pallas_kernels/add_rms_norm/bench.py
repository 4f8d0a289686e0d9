"""Benchmark of `add_rms_norm`, in decode steps and in a prefill: between the blocks of a Llama-3-8B layer, and of a
Gemma-3-4B layer, which normalises updates.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.add_rms_norm.op import add_normed_update, add_rms_norm
from pallas_kernels.timing import Row, floor, measure, num_rotations, on_gpu

_CALLS: dict[str, Callable[..., object]] = {
    "": lambda x, update, weight, _, **options: add_rms_norm(x, update, weight, **options),
    ", normed update": lambda x, update, weight, gain, **options: add_rms_norm(
        x, update, weight, update_gain=gain, **options
    ),
    ", normed update alone": lambda x, update, _, gain, **options: add_normed_update(x, update, gain, **options),
}
"""The operation with each kind of update; alone is one whose sum is not normalised."""


def add_rms_norm_rows() -> Iterator[Row]:
    """Yield a row for each kind of update, number of tokens and implementation."""
    for (case, call), size in zip(_CALLS.items(), (4096, 2560, 4096) if on_gpu() else (512,) * 3, strict=True):
        for num_tokens in (1, 16, 64, 256, 8192) if on_gpu() else (1, 64):
            num_bytes = num_tokens * size * 2 * (3 if case.endswith("alone") else 4)
            inputs = [_arrays(num_tokens, size, seed) for seed in range(num_rotations(num_bytes))]
            for implementation in ("sm90", "xla") if on_gpu() else ("xla",):
                run = functools.partial(call, eps=1e-5, implementation=implementation)
                shape = f"{num_tokens} x {size}"
                yield Row(f"{shape}{case}", implementation, measure(run, inputs), floor(num_bytes=num_bytes))


def _arrays(num_tokens: int, size: int, seed: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    x, update, weight, gain = jax.random.split(jax.random.key(seed), 4)
    return (
        jax.random.normal(x, (num_tokens, size), jnp.bfloat16),
        jax.random.normal(update, (num_tokens, size), jnp.bfloat16),
        jax.random.normal(weight, (size,), jnp.bfloat16),
        jax.random.normal(gain, (size,), jnp.bfloat16),
    )
