"""Benchmark of `recurrent_chunks`: prompts in a layer of Qwen3-Next and in one of Nemotron-H 8B."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent_chunks.op import recurrent_chunks
from pallas_kernels.recurrent_step.bench import SHAPES, arrays
from pallas_kernels.timing import Row, floor, measure, on_gpu


def recurrent_chunks_rows() -> Iterator[Row]:
    """Yield a row for each rule, division of the tokens into rows, and implementation."""
    num_tokens = 8192 if on_gpu() else 128
    for rule, shape in SHAPES.items():
        tokens, states = arrays(num_tokens, shape, seed=0, num_slots=64)
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
