"""Bring a weight into the L2 while a kernel waits for latency and the HBM idles: bulk copies that nobody waits for.

A kernel that does so has thread blocks of its own for it, behind those that work, so that they land on multiprocessors
whose copy engines have nothing else to do as long as there are some; or its blocks do so when they have begun the last
copy of their own. The weight comes in the order in which matmuls
begin: the first columns of all rows, then the next ones.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.hopper import NUM_SMS

MAX_TOKENS = 64
"""With more of them, weights are not what a step waits for."""

MIN_TOKENS_IN_ATTENTION = 16
"""From here on, the weight behind the attention comes at its end, below with the KV write: what is read of many
contexts would push it out again.
"""

_ROWS, _COLUMNS = 64, 256  # of a copy: at most 256 each


def operand(weight: Float[Array, "..."] | None, num_bytes: int) -> list[Float[Array, "N K"]]:
    """What a kernel takes besides its other operands to prefetch so many bytes: the weight, [N, *inputs], as a matrix.

    Nothing, if there is no weight, or none that the copy engine takes.
    """
    if weight is None or num_bytes <= 0 or math.prod(weight.shape) == 0:
        return []
    matrix = weight.reshape(-1, weight.shape[-1])
    is_aligned = matrix.shape[1] * matrix.dtype.itemsize % 16 == 0
    return [matrix] if is_aligned else []


def num_blocks(num_working: int) -> int:
    """Thread blocks to add to those that work: with few of these, as many as have a multiprocessor of their own."""
    return NUM_SMS - num_working if num_working <= NUM_SMS // 2 else NUM_SMS


def prefetch_share(weight: Any, index: Any, count: int, first: int, end: int) -> None:
    """In a kernel: the share of thread block `index`, one of `count`, in the bytes [first, end) of the matrix.

    The end of the kernel does not wait for them.
    """
    num_rows, num_columns = weight.shape
    rows, columns = min(_ROWS, num_rows), min(_COLUMNS, num_columns)
    down, across = pl.cdiv(num_rows, rows), pl.cdiv(num_columns, columns)
    first, end = (
        min(down * across, pl.cdiv(num_bytes, rows * columns * weight.dtype.itemsize)) for num_bytes in (first, end)
    )

    def copy(i, _):
        number = first + index + i * count
        row, column = lax.rem(number, jnp.int32(down)) * rows, lax.div(number, jnp.int32(down)) * columns
        plgpu.async_prefetch(weight.at[pl.ds(row, rows), pl.ds(column, columns)])

    share = lax.div(end - first - index + count - 1, jnp.int32(count))
    lax.fori_loop(jnp.int32(0), share, copy, None)
