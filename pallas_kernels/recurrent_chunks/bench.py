"""Benchmark of `recurrent_chunks`: prompts in a layer of Qwen3-Next and in one of Nemotron-H 8B."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.inputs import RECURRENCES, random_tokens
from pallas_kernels.recurrent_chunks.op import recurrent_chunks
from pallas_kernels.timing import Row, compare, floor, on_gpu, ours


def recurrent_chunks_rows() -> Iterator[Row]:
    """Yield a row for each rule, division of the tokens into rows, and implementation."""
    num_tokens = 8192 if on_gpu() else 128
    for rule, shape in RECURRENCES.items():
        tokens, states = random_tokens(num_tokens, 64, shape, 0)
        bound = floor(num_bytes=sum(x.nbytes for x in (*tokens, tokens.v)))
        calls = ours(_layer, corrects=rule == "delta rule")
        for num_rows in (1, 8, 64) if on_gpu() else (2,):
            slots = jnp.arange(num_rows, dtype=jnp.int32)
            starts = jnp.arange(num_rows + 1, dtype=jnp.int32) * (num_tokens // num_rows)
            rows = slots, starts, jnp.zeros(num_rows, bool), jnp.int32(0), jnp.int32(num_rows)
            case, carry = f"{rule}, {num_rows} x {num_tokens // num_rows}", (states, jnp.zeros_like(tokens.v))
            yield from compare(case, calls, [(tokens, *rows)], carry=carry, bound=bound)


def _layer(carry: Any, tokens: Any, *rows: jax.Array, **options: Any) -> Any:
    """Return states and outputs."""
    out, states = recurrent_chunks(tokens, carry[0], *rows, **options)
    return states, out
