"""Device operations of the Hopper kernel that Pallas lacks: masks and ALiBi biases without a register per column,
reciprocals without extra registers, rows stored from registers, rows cleared.

With an iota, LLVM would keep all column numbers in registers for the whole kernel, which then spills. Each operation is
executed by one warpgroup; `interpret` replaces it for the interpreter.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.mlir import REF, SCALAR, const_i32, inline, splat, value_of
from pallas_kernels.device.registers import at, matrix_of, row_and_quarter
from pallas_kernels.jax_internals import arith, ir, llvm, mlir_math, vector

_LAYOUT = plgpu.Layout.WGMMA


def scale_and_add_alibi(scores, scale: float, slope, distance, *, interpret: bool):
    """Give scale * scores[i, j] + slope * (j - i - distance), of a [64, columns] float32 matrix in WGMMA layout."""
    if interpret:
        query, key = (lax.broadcasted_iota(jnp.int32, scores.shape, dimension) for dimension in (0, 1))
        return scores * scale + slope * (key - query - distance).astype(jnp.float32)
    run = _inline_like(scores, functools.partial(_scale_and_add_alibi, scale=scale), _LAYOUT, SCALAR, SCALAR)
    return run(scores, jnp.full((128,), slope), splat(distance))


def mask_after(scores, distance, *, interpret: bool):
    """-inf for scores[i, j] of a float32 matrix in WGMMA layout where key j is after query i.

    `distance` is from the first key to the first query.
    """
    if interpret:
        query, key = (lax.broadcasted_iota(jnp.int32, scores.shape, dimension) for dimension in (0, 1))
        return jnp.where(key <= query + distance, scores, -jnp.inf)
    return _inline_like(scores, _mask_after, _LAYOUT, SCALAR)(scores, splat(distance))


def mask_window(scores, window: int, distance, *, is_causal: bool, interpret: bool):
    """-inf for scores[i, j] of a float32 matrix in WGMMA layout where key j, `window` or more before query i, is out.

    `distance` is from the first key to the first query. If `is_causal`, keys after their query are out too.
    """
    if interpret:
        query, key = (lax.broadcasted_iota(jnp.int32, scores.shape, dimension) for dimension in (0, 1))
        ago = query + distance - key
        return jnp.where((ago < window) & ((ago >= 0) | (not is_causal)), scores, -jnp.inf)
    mask = functools.partial(_mask_window, window=window, is_causal=is_causal)
    return _inline_like(scores, mask, _LAYOUT, SCALAR)(scores, splat(distance))


def reciprocal(x, *, interpret: bool):
    """Return 1 / x for a float32 matrix in WGMMA layout, with subnormals treated as 0 and an error of 1 ulp.

    This is one instruction, where a division needs several to scale values near an end of the range, and registers for
    them.
    """
    return 1.0 / x if interpret else _inline_like(x, _reciprocal, _LAYOUT)(x)


def widen(x, *, interpret: bool):
    """Return [64, columns] in WGMMA layout followed by as many columns of zeros."""
    if interpret:
        return jnp.concatenate([x, jnp.zeros_like(x)], axis=1)
    wide = jax.ShapeDtypeStruct((x.shape[0], 2 * x.shape[1]), x.dtype)
    return _inline_like(wide, _widen, _LAYOUT)(x)


def store_rows(ref, x, token, head, num_rows, *, first_column: int = 0, interpret: bool) -> None:
    """Store the first `num_rows` of x[64, D], 16 bits wide, in WGMMA layout, in ref[token:, head, first_column:] in
    global memory.

    D is a multiple of 16.
    """
    if interpret:

        def store_row(i, _):
            row = lax.dynamic_index_in_dim(x, i, keepdims=False)
            ref[token + i, head, first_column : first_column + x.shape[1]] = row

        lax.fori_loop(jnp.int32(0), num_rows, store_row, None)
        return
    run = functools.partial(_store_rows, from_column=first_column)
    inline(run, REF, _LAYOUT, *[SCALAR] * 3)(ref, x, *map(splat, (token, head, num_rows)))


def _inline_like(like: Any, run: Callable[..., Any], *arg_types: Any) -> Callable[..., Any]:
    """`run` among Pallas's operations; its result has the shape of `like`, in WGMMA layout."""
    return inline(run, *arg_types, out=plgpu.ShapeDtypeStruct(like.shape, like.dtype, layout=_LAYOUT))


def _scale_and_add_alibi(_, scores, slope, distance, *, scale: float):
    f32 = ir.F32Type.get()
    pair = ir.VectorType.get((2,), f32)
    slope, distance = value_of(slope), value_of(distance)
    first = arith.mulf(arith.sitofp(f32, arith.subi(_first_key_to_first_query(), distance)), slope)
    scales = vector.broadcast(pair, mgpu.c(scale, f32))
    registers = scores.registers.copy()
    for index, ahead in _keys_ahead(registers.shape):
        biases = [mlir_math.fma(mgpu.c(float(keys), f32), slope, first) for keys in ahead]
        registers[index] = mlir_math.fma(registers[index], scales, vector.from_elements(pair, biases))
    return matrix_of(registers)


def _mask_after(_, scores, distance):
    return _mask(scores, distance, lambda ago, keys: arith.cmpi(arith.CmpIPredicate.sge, ago, keys))


def _mask_window(_, scores, distance, *, window: int, is_causal: bool):
    # Unsigned, a key after its query, which is less than 0 ago, is as one long ago.
    below = arith.CmpIPredicate.ult if is_causal else arith.CmpIPredicate.slt
    bound = const_i32(window)
    return _mask(scores, distance, lambda ago, keys: arith.cmpi(below, arith.subi(ago, keys), bound))


def _mask(scores, distance, is_in: Callable[[ir.Value, ir.Value], ir.Value]):
    """-inf where not `is_in(ago, keys)`: a lane's first key is `ago` before its first query, this `keys` later."""
    ago = arith.subi(value_of(distance), _first_key_to_first_query())
    out = mgpu.c(-math.inf, ir.F32Type.get())
    registers = scores.registers.copy()
    for index, ahead in _keys_ahead(registers.shape):
        for i, keys in enumerate(ahead):
            score = vector.extract(registers[index], [], [i])
            score = arith.select(is_in(ago, const_i32(keys)), score, out)
            registers[index] = vector.insert(score, registers[index], [], [i])
    return matrix_of(registers)


def _reciprocal(_, x):
    f32 = ir.F32Type.get()
    registers = x.registers.copy()
    for index, pair in np.ndenumerate(registers):
        for i in range(2):
            value = vector.extract(pair, [], [i])
            value = llvm.inline_asm(f32, [value], "rcp.approx.ftz.f32 $0, $1;", "=f,f")
            pair = vector.insert(value, pair, [], [i])
        registers[index] = pair
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)


def _widen(_, x):
    zeros = mgpu.FragmentedArray.splat(mgpu.c(0.0, x.mlir_dtype), shape=x.shape, layout=x.layout)
    registers = np.concatenate([x.registers, zeros.registers], axis=1)
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)


def _store_rows(_, ref, x, token, head, num_rows, *, from_column: int) -> None:
    """Four lanes have a row's columns in pairs. They exchange them, so that each stores eight, or four, in one go."""
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    token, head, num_rows = map(value_of, (token, head, num_rows))
    _, num_heads, head_dim = ref.type.shape
    c = const_i32
    first_row, quarter = row_and_quarter()
    is_odd, is_high = (arith.cmpi(arith.CmpIPredicate.ne, arith.andi(quarter, c(bit)), c(0)) for bit in (1, 2))

    def word(matrix: int, half: int):
        pair = vector.bitcast(ir.VectorType.get((1,), i32), x.registers[at(matrix, half)])
        return vector.extract(pair, [], [0])

    def exchange(low, high, is_upper, distance: int):
        """Lanes without the bit keep `low` and get the other's; those with it `high`."""
        got = mgpu.utils.shfl_bfly(arith.select(is_upper, low, high), distance)
        return arith.select(is_upper, got, low), arith.select(is_upper, high, got)

    def of_four_matrices(first: int, half: int):
        """Return, in each lane, a row of one of four matrices."""
        a, b, c, d = (word(first + i, half) for i in range(4))
        (a, b), (c, d) = exchange(a, b, is_odd, 1), exchange(c, d, is_odd, 1)
        (a, c), (b, d) = exchange(a, c, is_high, 2), exchange(b, d, is_high, 2)
        return a, b, c, d

    base = mgpu.utils.memref_ptr(ref)
    num_matrices = x.shape[1] // 8
    in_fours = num_matrices // 4 * 4
    for half in range(2):
        row = arith.addi(first_row, c(8 * half))
        # Eight columns each, then the four of the last two matrices, if there are any left.
        eights = [of_four_matrices(first, half) for first in range(0, in_fours, 4)]
        four = exchange(word(in_fours, half), word(in_fours + 1, half), is_odd, 1) if in_fours < num_matrices else None
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, row, num_rows)):
            row_and_head = arith.addi(arith.muli(arith.addi(token, row), c(num_heads)), head)
            start = arith.muli(arith.extsi(i64, row_and_head), mgpu.c(head_dim, i64))

            def store(words, first_column: int, column, start=start):
                offset = arith.addi(start, arith.extsi(i64, arith.addi(column, c(first_column))))
                pointer = mgpu.utils.getelementptr(base, [offset], x.mlir_dtype)
                vector_type = ir.VectorType.get((len(words),), i32)
                llvm.store(vector.from_elements(vector_type, list(words)), pointer, alignment=4 * len(words))

            for i, words in enumerate(eights):
                store(words, from_column + 32 * i, arith.muli(quarter, c(8)))
            if four is not None:
                column = arith.addi(
                    arith.muli(arith.andi(quarter, c(1)), c(8)), arith.muli(arith.shrui(quarter, c(1)), c(4))
                )
                store(four, from_column + 8 * in_fours, column)


def _first_key_to_first_query():
    """Return how far a lane's first key is ahead of its first query, both relative to the tile's first."""
    query, quarter = row_and_quarter()
    return arith.subi(arith.muli(quarter, const_i32(2)), query)


def _keys_ahead(shape: tuple[int, ...]):
    """Yield the index of each register of a matrix, and how far the keys of its two scores are ahead of their query.

    Both are relative to the lane's first key and first query.
    """
    for index in np.ndindex(shape):
        _, matrix, _, _, half, *_ = index
        yield index, [8 * (matrix - half) + i for i in range(2)]
