"""Bench rows of the large matmul: a Llama-3-8B layer's weights at the rows of prefill and of large decode steps."""

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.large_matmul.op import Implementation, large_matmul
from pallas_kernels.timing import Row, floor, measure, num_rotations, on_gpu


class _Matmul(NamedTuple):
    """One of a layer's weights."""

    name: str
    outputs: int
    depth: int
    is_gated: bool = False

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (2, self.outputs, self.depth) if self.is_gated else (self.outputs, self.depth)


_FULL = (
    _Matmul("qkv", 6144, 4096),
    _Matmul("o", 4096, 4096),
    _Matmul("gate up, SiLU", 14336, 4096, is_gated=True),
    _Matmul("down", 4096, 14336),
)
_SMALL = tuple(m._replace(outputs=m.outputs // 16, depth=m.depth // 16) for m in _FULL)
_ROWS = (256, 512, 2048, 8192)


def large_matmul_rows() -> Iterator[Row]:
    """A row for each matmul, number of rows and implementation."""
    implementations: tuple[Implementation, ...] = ("sm90", "xla") if on_gpu() else ("xla",)
    dtype = jnp.bfloat16 if on_gpu() else jnp.float32
    for num_rows, case in itertools.product(_ROWS if on_gpu() else _ROWS[:1], _FULL if on_gpu() else _SMALL):
        num_weights = case.outputs * case.depth * (1 + case.is_gated)
        calls = range(num_rotations(2 * num_weights))
        inputs = [
            (
                jax.random.normal(jax.random.key(2 * call), (num_rows, case.depth), dtype),
                jax.random.normal(jax.random.key(2 * call + 1), case.weight_shape, dtype) * dtype(case.depth**-0.5),
            )
            for call in calls
        ]
        bound = floor(num_bytes=2 * num_weights, flops=2.0 * num_rows * num_weights)
        activation = jax.nn.silu if case.is_gated else None
        for implementation in implementations:
            call = functools.partial(large_matmul, activation=activation, implementation=implementation)
            yield Row(f"{num_rows} rows, {case.name}", implementation, measure(call, inputs, repeats=5), bound)
