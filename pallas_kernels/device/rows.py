"""Rows in the registers of a warpgroup: their RMS norms and largest values."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.mlir import REF, as_index, const_i32, elements_of, inline
from pallas_kernels.jax_internals import arith, memref

THREADS = 128
"""Threads of a warpgroup."""
MAX_VALUES_PER_THREAD = 128
"""Values of float32, two of them at a time: more would not fit into 255 registers."""
VECTOR = 8
"""Values of 16 bits that a thread loads at a time, at most."""


def why_not_row(size: int, dtype: jnp.dtype, *, multiple: int = THREADS) -> str | None:
    """Return why no kernel has rows of `size` values of this dtype in registers, or None if they fit."""
    longest = THREADS * MAX_VALUES_PER_THREAD
    if dtype in (jnp.bfloat16, jnp.float16) and size % multiple == 0 and multiple <= size <= longest:
        return None
    what = f"of a multiple of {multiple} and up to {longest} values"
    return f"rows must be bfloat16 or float16, {what}, got {size} in {dtype}"


def why_not_row_in_parts(size: int, dtype: jnp.dtype) -> str | None:
    """Return what `why_not_row` does, for kernels that hold `RowParts`."""
    whole = why_not_row(size, dtype)
    return whole if whole is None or size < THREADS else why_not_row(size, dtype, multiple=VECTOR)


def row_layout(size: int) -> Any:
    """Return the layout of a row in a warpgroup's registers, with the widest possible loads."""
    vector = next(width for width in (8, 4, 2, 1) if size % (THREADS * width) == 0)
    return plgpu.Layout.WG_STRIDED((size,), vector)


def norm(row, load_gain: Callable[[], Any], *, eps: float):
    """Return the RMS norm of a row in registers, in its dtype, times the gain, which is loaded when it is needed."""
    [normed] = RowParts(len(row)).norm([row], lambda: [load_gain()], eps=eps)
    return normed


@dataclasses.dataclass(frozen=True)
class RowParts:
    """A row of any multiple of `VECTOR` values in a warpgroup's registers: whole if its threads have equally many.

    If not, it is two arrays, of as many values from its first and from its last one on as threads can share. What both
    have is computed twice, and equal.
    """

    size: int

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First value and number of values of each part."""
        if self.size % THREADS == 0:
            return [(0, self.size)]
        unit = THREADS * VECTOR if self.size >= THREADS * VECTOR else THREADS
        return [(0, self.size // unit * unit), (self.size - unit, unit)]

    def load(self, row) -> list[Any]:
        """Return the parts of a row in memory."""
        return [plgpu.load(part, layout=row_layout(part.shape[-1])) for part in self.of(row)]

    def store(self, row, parts: list[Any]) -> None:
        """Write the parts to a row in memory."""
        for part, values in zip(self.of(row), parts, strict=True):
            part[...] = values

    def of(self, row) -> list[Any]:
        """Return refs of the parts of a row in memory."""
        return [row] if len(self.spans) == 1 else [row.at[pl.ds(*span)] for span in self.spans]

    def norm(self, parts: list[Any], load_gain: Callable[[], list[Any]], *, eps: float) -> list[Any]:
        """Return what `norm` does."""
        wide = [part.astype(jnp.float32) for part in parts]
        total, end = 0.0, 0
        for values, (start, count) in zip(wide, self.spans, strict=True):
            squares = values * values
            if start < end:
                index = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (count,), 0), row_layout(count))
                squares = jnp.where(index < end - start, 0.0, squares)
            total, end = total + jnp.sum(squares), start + count
        scale = lax.rsqrt(total / self.size + eps)
        gains = [gain.astype(jnp.float32) for gain in load_gain()]
        return [(x * scale * gain).astype(part.dtype) for x, gain, part in zip(wide, gains, parts, strict=True)]


def kept(row, *, interpret: bool):
    """Return a row of 16-bit values such that registers hold these, not what they come from or are widened to later.

    `lax.optimization_barrier` does that too, but mixes up the columns of an array of several registers of more than 32
    bits (jax 0.11.2: it takes them apart word by word and puts them together register by register).
    """
    if interpret or len(row) % (2 * THREADS):  # a barrier takes pairs of values, which such rows are not loaded in
        return row
    layout = row_layout(len(row))
    return inline(_kept, layout, out=plgpu.ShapeDtypeStruct(row.shape, row.dtype, layout=layout))(row)


def _kept(_, row) -> Any:
    registers = row.registers.reshape(-1, 1)
    layout = mgpu.WGStridedFragLayout((THREADS * row.layout.vec_size,), row.layout.vec_size)
    arrays = [mgpu.FragmentedArray(_registers=one, _layout=layout, _is_signed=None) for one in registers]
    barred: Any = mgpu.optimization_barrier(*arrays)  # one array as such, several as a list
    kept = np.concatenate([one.registers for one in (barred if len(arrays) > 1 else [barred])])
    return mgpu.FragmentedArray(_registers=kept, _layout=row.layout, _is_signed=None)


def store_warp_maxima(maxima, values, warpgroup, *, interpret: bool) -> None:
    """Store the largest value of each warp, NaN if it has one, at `maxima[4 * warpgroup + warp]` in shared memory.

    `values` is a row, or a part of one, in a warpgroup's registers. Others see the maxima after a barrier.
    """
    if interpret:
        maxima[pl.ds(4 * warpgroup, 4)] = jnp.max(values.reshape(4, -1), axis=1)
    else:
        inline(_store_warp_maxima, REF, row_layout(len(values)))(maxima, values)


def _store_warp_maxima(_, maxima, values) -> None:
    lanes = [x for register in values.registers.flat for x in elements_of(register, register.type.shape[0])]
    largest = functools.reduce(arith.maximumf, lanes)
    for distance in (16, 8, 4, 2, 1):
        largest = arith.maximumf(largest, mgpu.utils.shfl_bfly(largest, distance))
    index = mgpu.utils.thread_idx()
    with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, arith.remui(index, const_i32(32)), const_i32(0))):
        memref.store(largest, maxima, [as_index(arith.divui(index, const_i32(32)))])
