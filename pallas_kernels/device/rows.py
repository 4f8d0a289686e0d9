"""Rows in the registers of a warpgroup: their RMS norms and largest values."""

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


def why_not_row(size: int, dtype: jnp.dtype) -> str | None:
    """Return why no kernel has rows of `size` values of this dtype in registers, or None if they fit."""
    if dtype in (jnp.bfloat16, jnp.float16) and size % THREADS == 0 and size <= THREADS * MAX_VALUES_PER_THREAD:
        return None
    return (
        f"rows must be bfloat16 or float16, of a multiple of {THREADS} and up to {THREADS * MAX_VALUES_PER_THREAD} "
        f"values, got {size} in {dtype}"
    )


def row_layout(size: int) -> Any:
    """Return the layout of a row in a warpgroup's registers, with the widest possible loads."""
    vector = next(width for width in (8, 4, 2, 1) if size % (THREADS * width) == 0)
    return plgpu.Layout.WG_STRIDED((size,), vector)


def norm(row, load_gain: Callable[[], Any], *, eps: float):
    """Return the RMS norm of a row in registers, in its dtype, times the gain, which is loaded when it is needed."""
    wide = row.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide) / len(wide) + eps)
    gain = load_gain().astype(jnp.float32)
    return (wide * scale * gain).astype(row.dtype)


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
