"""The inlined Mosaic GPU code of the wide kernel of grouped codes in plain Pallas, which the interpreter runs."""

import jax.numpy as jnp
from emulated_codes import TYPES, e2m1_values, halves, load_words, store_rows, vectors_of, zeros
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.codes import codes_per_byte, values_of
from pallas_kernels.device.product_of_codes import OUTPUTS, PIECE

__all__ = [
    "copy_staged",
    "halves",
    "load_scales",
    "load_words",
    "multiply",
    "operand",
    "stage",
    "store_rows",
    "vectors_of",
    "wait",
    "zeros",
]


def load_scales(ref, base, first, column, *, num_outputs, is_gated, groups):
    words = load_words(ref, (base, first), column, count=groups, num_outputs=num_outputs, is_gated=is_gated)
    dtype = jnp.float8_e8m0fnu if jnp.dtype(ref.dtype).itemsize == 1 else ref.dtype
    return jnp.stack([vector[:, 0] for vector in vectors_of(words, range(groups), dtype)], axis=1)


def operand(
    codes, slot, block, piece, scales=None, zeros=None, minimums=None, *, code, is_gated, groups, num_columns, dtypes
):
    if is_gated:
        found = [codes[slot, pl.ds(half * codes.shape[1] // 2 + 32 * block, 32)] for half in range(2)]
        stored = jnp.concatenate(found)
    else:
        stored = codes[slot, pl.ds(64 * block, 64)]
    size = PIECE // codes_per_byte(code)
    stored = lax.dynamic_slice_in_dim(stored, piece * size, size, axis=1)
    stored = lax.bitcast_convert_type(stored, TYPES.get(code, jnp.uint8))
    values = e2m1_values(stored) if code == "e2m1" else values_of(stored, code)
    if groups:
        of_group = values.reshape(OUTPUTS, groups, -1)
        if zeros is not None:
            of_group -= zeros[..., None]
        of_group *= _rounded(scales)[..., None]
        if minimums is not None:
            of_group -= _rounded(minimums)[..., None]
        values = of_group.reshape(OUTPUTS, PIECE)
    return values.astype(jnp.bfloat16)


def _rounded(values):
    return values.astype(jnp.bfloat16).astype(jnp.float32)


def stage(ref, y, warpgroup, row, *, is_gated):
    size = OUTPUTS // 2 if is_gated else OUTPUTS
    ref[warpgroup, pl.ds(row, 8), pl.ds(0, size)] = y[:size].T.astype(ref.dtype)


def copy_staged(ref, staged, warpgroup, row, num_rows, first, *, rows, width):
    for own in range(rows):
        for start in range(0, width, 8):

            @pl.when((own < num_rows) & (first + start < ref.shape[1]))
            def _(own=own, start=start):
                ref[row + own, pl.ds(first + start, 8)] = staged[warpgroup, own, pl.ds(start, 8)]


def multiply(sums, values, x, slot):
    rows = x[slot]
    plgpu.commit_smem()  # wgmma, which reads asynchronously, needs none
    return sums + values.astype(jnp.float32) @ rows.astype(jnp.float32).T


def wait(num_in_flight):
    pass
