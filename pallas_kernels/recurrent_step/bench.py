"""Benchmark of `recurrent_step`: decode steps of a layer of Qwen3-Next and of one of Nemotron-H 8B."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.inputs import RECURRENCES, random_tokens
from pallas_kernels.recurrent_step.op import recurrent_step
from pallas_kernels.timing import Row, compare, floor, num_rotations, on_gpu, ours


def recurrent_step_rows() -> Iterator[Row]:
    """Yield a row for each rule, number of rows and implementation; states are those of several layers."""
    for rule, shape in RECURRENCES.items():
        for num_rows in (1, 16, 64, 256) if on_gpu() else (1, 4):
            num_bytes = 2 * 4 * num_rows * int(np.prod(shape))
            layers = [random_tokens(num_rows, num_rows, shape, seed) for seed in range(num_rotations(num_bytes))]
            tokens, states = zip(*layers, strict=True)
            rows = jnp.arange(num_rows, dtype=jnp.int32)[::-1], jnp.zeros(num_rows, bool)
            yield from compare(
                f"{rule}, {num_rows} rows",
                ours(_layers, corrects=rule == "delta rule"),
                [(tokens, *rows)],
                carry=(states, tuple(token.v for token in tokens)),
                operations=len(layers),
                bound=floor(num_bytes=num_bytes),
            )


def _layers(carry: Any, tokens: Any, slots: jax.Array, begins: jax.Array, **options: Any) -> Any:
    """Return the states and the outputs of layers."""
    steps = zip(tokens, carry[0], strict=True)
    outs, states = zip(*(recurrent_step(each, held, slots, begins, **options) for each, held in steps), strict=True)
    return states, outs
