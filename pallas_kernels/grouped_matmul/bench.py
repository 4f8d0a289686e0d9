"""Benchmark of the grouped matmul: gate and up, and down, of layers with experts, compared with jax's own kernel."""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul.op import grouped_matmul
from pallas_kernels.grouped_matmul.xla import ragged_dot
from pallas_kernels.inputs import swiglu
from pallas_kernels.timing import Row, compare, floor, num_rotations, on_gpu, random_arrays


class _Case(NamedTuple):
    """Rows spread evenly over some of the groups, or at random over all."""

    num_rows: int
    num_used: int
    num_groups: int
    outputs: int
    depth: int
    is_gated: bool = False
    is_random: bool = False

    @property
    def name(self) -> str:
        spread = "at random" if self.is_random else f"in {self.num_used}"
        gate = "2 x " if self.is_gated else ""
        return f"{self.num_rows} rows {spread} of {self.num_groups}, {gate}{self.outputs} x {self.depth}"

    def sizes(self, seed: int) -> np.ndarray:
        """Return the group sizes; each seed uses other groups, so that no weight is still in the L2 cache."""
        if self.is_random:
            chosen = np.random.default_rng(seed).integers(0, self.num_groups, self.num_rows)
            return np.bincount(chosen, minlength=self.num_groups).astype(np.int32)
        sizes = np.where(np.arange(self.num_groups) < self.num_used, self.num_rows // self.num_used, 0)
        return np.roll(sizes, seed * self.num_used).astype(np.int32)

    @property
    def matrix_bytes(self) -> int:
        return 2 * self.outputs * self.depth * (1 + self.is_gated)


# The shapes of Qwen3 30B A3B, whose tokens have 8 of 128 experts.
_GATE_UP = _Case(num_rows=8, num_used=8, num_groups=128, outputs=768, depth=2048, is_gated=True)
_DOWN = _Case(num_rows=8, num_used=8, num_groups=128, outputs=2048, depth=768)
_PLAIN = _Case(num_rows=8192, num_used=64, num_groups=64, outputs=1536, depth=2048)
_FULL = (
    _GATE_UP,
    _DOWN,
    *(
        case._replace(num_rows=num_rows, num_used=128, is_random=True)
        for num_rows in (512, 2048, 65_536)
        for case in (_GATE_UP, _DOWN)
    ),
    _PLAIN,
    _PLAIN._replace(is_random=True),
)
_SMALL = tuple(
    _Case(num_rows=num_rows, num_used=num_used, num_groups=64, outputs=256, depth=256)
    for num_rows, num_used in ((8, 8), (64, 8), (64, 64), (512, 8), (512, 64))
)
_RAGGED_DOT_BYTES = 2**32
"""More weights than these `lax.ragged_dot` is not asked to copy."""


def _peer(x: jax.Array, weight: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Run the kernel that comes with jax."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot as ragged_dot_mgpu

    return ragged_dot_mgpu(
        x,
        weight,
        group_sizes=group_sizes,
        block_m=128,
        block_n=128,
        block_k=64,
        max_concurrent_steps=4,
        grid_block_n=4,
        transpose_rhs=True,
    )


def grouped_matmul_rows() -> Iterator[Row]:
    """Yield a row for each case and implementation."""
    for case in _FULL if on_gpu() else _SMALL:
        num_bytes = case.num_used * case.matrix_bytes
        shape = (case.num_groups, 2) if case.is_gated else (case.num_groups,)
        [weight] = random_arrays(0, (*shape, case.outputs, case.depth))
        seeds = range(num_rotations(num_bytes))
        rows = [random_arrays(seed, (case.num_rows, case.depth)) for seed in seeds]
        inputs = [(*x, weight, jnp.asarray(case.sizes(seed))) for x, seed in zip(rows, seeds, strict=True)]
        flops = 2.0 * case.num_rows * case.outputs * case.depth * (1 + case.is_gated)
        calls: dict[str, Callable[..., jax.Array]] = {"xla": grouped_matmul, "lax.ragged_dot": ragged_dot}
        if on_gpu():
            activation = swiglu if case.is_gated else None
            calls = {"sm90": functools.partial(grouped_matmul, activation=activation, implementation="sm90")}
            if not case.is_gated and weight.nbytes * len(inputs) <= _RAGGED_DOT_BYTES:
                calls |= {"lax.ragged_dot": ragged_dot, "ragged_dot_mgpu": _peer}
        yield from compare(case.name, calls, inputs, bound=floor(num_bytes=num_bytes, flops=flops))
