"""What the Hopper kernel needs and Pallas does not offer: ALiBi's biases and windows, at no register a column.

From an iota, LLVM would keep all column numbers in registers for the whole kernel, which then spills. Acts as one
warpgroup; `interpret` swaps in what the interpreter can do.
"""

import functools
import math
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, vector
from jax._src.lib.mlir.dialects import math as mlir_math
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

_LAYOUT = plgpu.Layout.WGMMA
_SCALAR = plgpu.Layout.WG_SPLAT((128,))


def scale_and_add_alibi(scores, scale: float, slope, distance, *, interpret: bool):
    """Give scale * scores[i, j] + slope * (j - i - distance), of a [64, columns] float32 matrix in WGMMA layout."""
    if interpret:
        query, key = (lax.broadcasted_iota(jnp.int32, scores.shape, dimension) for dimension in (0, 1))
        return scores * scale + slope * (key - query - distance).astype(jnp.float32)
    run: Any = cast(Any, plgpu.inline_mgpu)(
        arg_types=(_LAYOUT, _SCALAR, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct(scores.shape, scores.dtype, layout=_LAYOUT),
    )(functools.partial(_scale_and_add_alibi, scale=scale))
    return run(scores, jnp.full((128,), slope), jnp.full((128,), distance))


def mask_window(scores, window: int, distance, *, is_causal: bool, interpret: bool):
    """-inf for scores[i, j] of a float32 matrix in WGMMA layout where key j, `window` or more before query i, is out.

    `distance` is from the first key to the first query. If `is_causal`, keys after their query are out too.
    """
    if interpret:
        query, key = (lax.broadcasted_iota(jnp.int32, scores.shape, dimension) for dimension in (0, 1))
        ago = query + distance - key
        return jnp.where((ago < window) & ((ago >= 0) | (not is_causal)), scores, -jnp.inf)
    run: Any = cast(Any, plgpu.inline_mgpu)(
        arg_types=(_LAYOUT, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct(scores.shape, scores.dtype, layout=_LAYOUT),
    )(functools.partial(_mask_window, window=window, is_causal=is_causal))
    return run(scores, jnp.full((128,), distance))


def _scale_and_add_alibi(_, scores, slope, distance, *, scale: float):
    f32 = ir.F32Type.get()
    pair = ir.VectorType.get((2,), f32)
    [slope], [distance] = slope.registers.flat, distance.registers.flat
    first = arith.mulf(arith.sitofp(f32, arith.subi(_first_key_to_first_query(), distance)), slope)
    scales = vector.broadcast(pair, mgpu.c(scale, f32))
    registers = scores.registers.copy()
    for place, ahead in _keys_ahead(registers.shape):
        biases = [mlir_math.fma(mgpu.c(float(keys), f32), slope, first) for keys in ahead]
        registers[place] = mlir_math.fma(registers[place], scales, vector.from_elements(pair, biases))
    return mgpu.FragmentedArray(_registers=registers, _layout=scores.layout, _is_signed=scores.is_signed)


def _mask_window(_, scores, distance, *, window: int, is_causal: bool):
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    [distance] = distance.registers.flat
    ago = arith.subi(distance, _first_key_to_first_query())  # the lane's first key, as seen from its first query
    # Unsigned, a key after its query, which is less than 0 ago, is as one long ago.
    below = arith.CmpIPredicate.ult if is_causal else arith.CmpIPredicate.slt
    out = mgpu.c(-math.inf, f32)
    registers = scores.registers.copy()
    for place, ahead in _keys_ahead(registers.shape):
        for i, keys in enumerate(ahead):
            is_in = arith.cmpi(below, arith.subi(ago, mgpu.c(keys, i32)), mgpu.c(window, i32))
            score = vector.extract(registers[place], [], [i])
            registers[place] = vector.insert(arith.select(is_in, score, out), registers[place], [], [i])
    return mgpu.FragmentedArray(_registers=registers, _layout=scores.layout, _is_signed=scores.is_signed)


def _first_key_to_first_query():
    """How far a lane's first key is ahead of its first query, both counted from the tile's first.

    A warp has 16 rows in 8 x 8 matrices, and a lane two columns of a row in each of them.
    """
    i32 = ir.IntegerType.get_signless(32)

    def c(value: int):
        return mgpu.c(value, i32)

    thread = mgpu.utils.thread_idx()
    warp = arith.remui(arith.divui(thread, c(32)), c(4))
    lane = arith.remui(thread, c(32))
    query = arith.addi(arith.muli(warp, c(16)), arith.divui(lane, c(4)))
    key = arith.muli(arith.remui(lane, c(4)), c(2))
    return arith.subi(key, query)


def _keys_ahead(shape: tuple[int, ...]):
    """The place of each register of a matrix, and how far the keys of its two scores are ahead of their query.

    As against the lane's first key and first query.
    """
    for place in np.ndindex(shape):
        _, matrix, _, _, half, *_ = place
        yield place, [8 * (matrix - half) + i for i in range(2)]
