"""Benchmark of the matmuls of a decode step: the shapes of a Llama-3-8B layer, fused with neighbouring operations."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.implementation import Implementation
from pallas_kernels.small_matmul.op import Normed, matmul, matmul_then_norm
from pallas_kernels.timing import Row, compare, floor, num_rotations, on_gpu, ours, random_arrays


class _Matmul(NamedTuple):
    """One of a layer's weights."""

    name: str
    outputs: int
    depth: int
    is_gated: bool = False
    has_norm_after: bool = False

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (2, self.outputs, self.depth) if self.is_gated else (self.outputs, self.depth)


_FULL = (
    _Matmul("norm, qkv", 6144, 4096),
    _Matmul("o, add, norm", 4096, 4096, has_norm_after=True),
    _Matmul("norm, gate up, SiLU", 14336, 4096, is_gated=True),
    _Matmul("down, add, norm", 4096, 14336, has_norm_after=True),
)
_SMALL = tuple(m._replace(outputs=m.outputs // 16, depth=m.depth // 16) for m in _FULL)
_CALLS = 24
"""Calls per program, since launching a program takes as long as a small matmul."""


def small_matmul_rows() -> Iterator[Row]:
    """Yield a row for each matmul, number of rows and implementation."""
    for num_rows, case in itertools.product((1, 8, 16, 32, 64) if on_gpu() else (1, 8), _FULL if on_gpu() else _SMALL):
        num_bytes = 2 * case.outputs * case.depth * (1 + case.is_gated)
        weights = [random_arrays(seed, case.weight_shape)[0] for seed in range(num_rotations(num_bytes))]
        [gain] = random_arrays(0, (case.outputs,))
        shapes = (num_rows, case.depth), (num_rows, case.outputs)
        rows = [random_arrays(call, *shapes) for call in range(_CALLS)]
        inputs = [(x, weights[call % len(weights)], y, gain) for call, (x, y) in enumerate(rows)]
        name, bound = f"{num_rows} rows, {case.name}", floor(num_bytes=num_bytes)
        yield from compare(name, ours(_call, case=case), inputs, bound=bound)


def _call(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array,
    gain: jax.Array,
    *,
    case: _Matmul,
    implementation: Implementation,
) -> Any:
    if case.has_norm_after:
        return matmul_then_norm(x, weight, residual=residual, gain=gain, eps=1e-5, implementation=implementation)
    # "sm90" finishes the norm in this matmul, "xla" would have finished it before.
    squares = jnp.ones((64, 128)) if implementation == "sm90" else None
    activation = jax.nn.silu if case.is_gated else None
    return matmul(Normed(x, squares, 1e-5), weight, activation=activation, implementation=implementation)
