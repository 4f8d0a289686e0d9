"""What the kernel of grouped codes does in inlined Mosaic GPU code, in plain Pallas, which the interpreter runs.

A warpgroup's 64 outputs are in order; of gate and up, the 32 of gate come first.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.codes import E2M1_EXPONENT, codes_per_byte, values_of
from pallas_kernels.device.product_of_codes import BYTES, OUTPUTS, PIECE, factor_of_sums

EXPONENTS = 8
"""Exponents of an output in a block of MXFP4."""
TYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}


def zeros(rows):
    return jnp.zeros((OUTPUTS, rows), jnp.float32)


def add_product(
    code, *, rows, is_gated, num_scales, has_zeros, has_minimums, has_pieces_apart, part_of_k: tuple[int, int]
):
    assert has_pieces_apart
    part, num_parts = part_of_k
    columns = BYTES * codes_per_byte(code) // num_parts
    size = columns // max(1, num_scales)
    options = {"group_size": size, "has_minimums": has_minimums}
    factor = factor_of_sums(code, rows=rows, num_scales=num_scales, **options)

    def add(sums, codes, slot, warpgroup, x, first_piece, *vectors):
        slot, warpgroup, first_piece = slot[0], warpgroup[0], first_piece[0]
        if is_gated:
            found = [codes[slot, pl.ds(128 * half + 32 * warpgroup, 32)] for half in range(2)]
            stored = jnp.concatenate(found)
        else:
            stored = codes[slot, pl.ds(64 * warpgroup, 64)]
        stored = lax.bitcast_convert_type(stored, TYPES.get(code, jnp.uint8))
        values = e2m1_values(stored) if code == "e2m1" else values_of(stored, code)
        values = values[:, part * columns : (part + 1) * columns]
        if num_scales:
            groups = [
                jnp.stack([each[:, 0] for each in vectors[i : i + num_scales]], axis=1)[..., None]
                for i in range(0, len(vectors), num_scales)
            ]
            of_group = values.reshape(OUTPUTS, num_scales, -1)
            if has_zeros:
                of_group -= groups[1]
            of_group *= groups[0]
            if has_minimums:
                of_group -= groups[-1]
            values = of_group.reshape(OUTPUTS, columns)
        first_piece += part * columns // PIECE
        pieces = [x[first_piece + piece] for piece in range(columns // PIECE)]
        plgpu.commit_smem()  # wgmma, which reads asynchronously, needs none
        return sums + values / factor @ jnp.concatenate(pieces, axis=1).astype(jnp.float32).T

    return add


def load_words(ref, places, column, *, count, num_outputs, is_gated):
    """Return numbers instead of words that hold several."""
    base, first = places
    columns = [jnp.minimum(column + index, ref.shape[1] - 1) for index in range(count)]
    return tuple(_of_outputs(ref, base, first, each, num_outputs=num_outputs, is_gated=is_gated) for each in columns)


def vectors_of(words, indices, dtype):
    words = [words[index] for index in indices]
    if jnp.dtype(dtype).itemsize == 1:
        words = [lax.bitcast_convert_type(word, dtype) for word in words]
    return tuple(jnp.broadcast_to(word.astype(jnp.float32)[:, None], (OUTPUTS, 8)) for word in words)


def e2m1_values(stored):
    """`values_of` without its table, which no kernel may close over."""
    codes = jnp.stack([stored & jnp.uint8(15), stored >> jnp.uint8(4)], axis=-1).reshape(len(stored), -1)
    codes = codes.astype(jnp.int32)
    exponent, half, sign = (codes >> 1) & 3, (codes & 1).astype(jnp.float32) / 2, jnp.where(codes < 8, 1.0, -1.0)
    power = lax.bitcast_convert_type((exponent + 126) << 23, jnp.float32)
    return sign * jnp.where(exponent == 0, half, (1 + half) * power)


def load_rows(x, row, step, turn, tiles):
    """Return the rows of a step, whose columns may be in any order that both operands have."""
    num_rows, depth = x.shape
    found = jnp.stack([x[jnp.minimum(row + own, num_rows - 1)] for own in range(tiles.rows)])
    found = jnp.pad(found, ((0, 0), (0, 2 * tiles.columns)))
    start = jnp.minimum(step * tiles.columns, depth + tiles.columns)
    return lax.dynamic_slice(found, (0, start), (tiles.rows, tiles.columns))


def put_rows(loaded, ref, first_piece, turn, tiles):
    for piece in range(tiles.pieces):
        ref[first_piece + piece] = loaded[:, piece * PIECE : (piece + 1) * PIECE]


def load_codes(codes, slot, warpgroup, *, is_gated):
    if not is_gated:
        return codes[slot, pl.ds(64 * warpgroup, 64)]
    return jnp.concatenate([codes[slot, pl.ds(128 * half + 32 * warpgroup, 32)] for half in range(2)])


def load_exponents(ref, places, block, *, num_outputs, is_gated):
    options = {"num_outputs": num_outputs, "is_gated": is_gated}
    words = load_words(ref, places, block * EXPONENTS, count=EXPONENTS, **options)
    return jnp.stack([each[:, 0] for each in vectors_of(words, range(EXPONENTS), "float8_e8m0fnu")], axis=1)


def add_mxfp4(sums, codes, exponents, x, first_piece):
    values = e2m1_values(lax.bitcast_convert_type(codes, jnp.uint8)).reshape(OUTPUTS, EXPONENTS, -1)
    values = (values * exponents[..., None]).reshape(OUTPUTS, -1)
    rows = jnp.concatenate([x[first_piece + piece] for piece in range(values.shape[1] // PIECE)], axis=1)
    plgpu.commit_smem()  # wgmma, which reads asynchronously, needs none
    return sums + values * 2.0 ** -(E2M1_EXPONENT // 2) @ rows.astype(jnp.float32).T


def _of_outputs(ref, base, first, column, *, num_outputs, is_gated):
    size = OUTPUTS // 2 if is_gated else OUTPUTS
    start = jnp.minimum(first, num_outputs - size)
    own = jnp.minimum(first + jnp.arange(size), num_outputs - 1) - start
    found = [ref[pl.ds(base + half * num_outputs + start, size), column][own] for half in range(1 + is_gated)]
    return jnp.concatenate(found)


def halves(y):
    gate, up = jnp.split(y, 2)
    return jnp.concatenate([gate] * 2), jnp.concatenate([up] * 2)


def store_sums(ref, sums, part):
    ref[part] = sums.reshape(ref.shape[1:])


def load_sums(ref, part, *, rows):
    return ref[part].reshape(OUTPUTS, rows)


def store_rows(ref, y, row, num_rows, first, *, is_gated):
    y = y.astype(ref.dtype)
    for own in range(8):
        for start in range(0, OUTPUTS // 2 if is_gated else OUTPUTS, 8):

            @pl.when((own < num_rows) & (first + start < ref.shape[1]))
            def _(own=own, start=start):
                ref[row + own, pl.ds(first + start, 8)] = y[start : start + 8, own]
