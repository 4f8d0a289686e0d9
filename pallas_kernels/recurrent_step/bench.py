"""Benchmark of `recurrent_step`: decode steps of a layer of Qwen3-Next and of one of Nemotron-H 8B."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.recurrent_step.op import Tokens, recurrent_step
from pallas_kernels.timing import Row, floor, measure, num_rotations, on_gpu

SHAPES = {"delta rule": (16, 2, 128, 128), "Mamba-2": (8, 16, 128, 64)}


def recurrent_step_rows() -> Iterator[Row]:
    """Yield a row for each rule, number of rows and implementation; states are those of several layers."""
    for rule, shape in SHAPES.items():
        for num_rows in (1, 16, 64, 256) if on_gpu() else (1, 4):
            num_bytes = 2 * 4 * num_rows * int(np.prod(shape))
            layers = [arrays(num_rows, shape, seed) for seed in range(num_rotations(num_bytes))]
            tokens, states = zip(*layers, strict=True)
            rows = jnp.arange(num_rows, dtype=jnp.int32)[::-1], jnp.zeros(num_rows, bool)
            for implementation in ("sm90", "xla") if on_gpu() else ("xla",):
                step = functools.partial(recurrent_step, corrects=rule == "delta rule", implementation=implementation)
                carry = jax.tree.map(jnp.copy, (states, tuple(token.v for token in tokens)))
                took = measure(functools.partial(_layers, step), [(tokens, *rows)], carry=carry) / len(layers)
                yield Row(f"{rule}, {num_rows} rows", implementation, took, floor(num_bytes=num_bytes))


def _layers(step: Any, carry: Any, tokens: Any, slots: jax.Array, begins: jax.Array) -> Any:
    """Return the states and the outputs of layers."""
    stepped = [step(each, states, slots, begins) for each, states in zip(tokens, carry[0], strict=True)]
    return tuple(states for _, states in stepped), tuple(out for out, _ in stepped)


def arrays(
    num_rows: int, shape: tuple[int, int, int, int], seed: int, *, num_slots: int | None = None
) -> tuple[Tokens, jax.Array]:
    """Return tokens and states, by default as many."""
    H, G, K, V = shape
    sizes = (num_rows, H, K), (num_rows, H, K), (num_rows, H, G, V), (num_rows, H, G), (num_rows, H, G)
    keys = jax.random.split(jax.random.key(seed), 6)
    q, k, v, decay, beta = (jax.random.normal(key, size) for key, size in zip(keys, sizes, strict=False))
    norm = functools.partial(jnp.linalg.norm, axis=-1, keepdims=True)
    tokens = Tokens(q / norm(q), k / norm(k), v, -jnp.abs(decay), jax.nn.sigmoid(beta))
    return tokens, jax.random.normal(keys[5], (num_slots or num_rows, *shape))
