"""The product of a block of weights, as TMA stores its codes in shared memory, and a few rows: inlined Mosaic GPU code.

Codes become bfloat16 in registers, operand A of wgmma; rows, in shared memory, are operand B. Any order of columns may
be chosen, if both operands agree: a thread takes those that are in the same word of codes, so that no code is shuffled,
and `interleave_rows` puts the columns of the rows in the same order. Sums are [64 outputs, rows] in WGMMA layout.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.codes import (
    E2M1_EXPONENT,
    MULTIPLIERS,
    Code,
    codes_per_byte,
    pair_of_bytes,
    pair_of_nibbles,
    pairs_of_table,
    rearranged,
    small_pair_of_e2m1,
    times,
)
from pallas_kernels.device.mlir import SCALAR, as_index, const_i32, const_index, inline, splat, thread, value_of
from pallas_kernels.device.registers import at, matrix_of, registers_for, row_and_quarter
from pallas_kernels.device.swizzled import tiled
from pallas_kernels.jax_internals import arith, ir, mlir_math, nvvm, vector

OUTPUTS = 64
"""Outputs of a block, one block per warpgroup."""
BYTES = 128
"""Bytes of codes per output in a block."""
UNIT = 32
"""Columns whose order `interleave_rows` changes at a time."""
SMALLEST_GROUP = UNIT // 2
"""Fewest columns that may have a scale: a thread's codes of 4 bits of a unit are in one half of it."""
PIECE = 64
"""Columns of operand A that wgmma takes at a time."""
BATCH = 128
"""Columns that are converted, multiplied and waited for at a time: meanwhile other warpgroups convert theirs."""
MAX_ROWS_OF_SCALED_SUMS = 16
"""With more rows there are too few registers for the sums of a group apart: rounded scales multiply the weights."""

_LAYOUT = plgpu.Layout.WGMMA
_CODES = plgpu.RefType(tiled(BYTES, itemsize=1))
_ROWS = plgpu.RefType(tiled(PIECE))


def add_product(
    code: Code,
    *,
    rows: int,
    is_gated: bool,
    num_scales: int,
    has_zeros: bool,
    has_minimums: bool = False,
    has_pieces_apart: bool = False,
    part_of_k: tuple[int, int] = (0, 1),
) -> Callable[..., Any]:
    """Return a function that adds a block's product to sums [64, rows] of float32.

    It takes the sums; the ring of codes, [slots, 256, 128] bytes, its slot and the warpgroup, which has 64 outputs in a
    row, or if `is_gated` 32 of the first 128, which are gate, and the same of the others, which are up, in turns of
    eight; the ring of rows, [slots, rows, columns] of bfloat16, interleaved, and its slot; `num_scales` factors for
    equal parts of the block's columns, [64, 8] with equal columns; as many zero points, if there are any; and as many
    minimums, which are subtracted from the weights, if there are any. Without scales the sums are those of codes; all
    sums are to be multiplied by `factor_of_sums` in the end. With
    `has_pieces_apart` the ring of rows is [slots * pieces, rows, PIECE], and its slot the first piece of the block.
    `part_of_k` picks one of so many parts of the columns, those of `num_scales`.
    """
    vectors = (_LAYOUT,) * (num_scales * (1 + has_zeros + has_minimums))
    out = plgpu.ShapeDtypeStruct((OUTPUTS, rows), jnp.float32, layout=_LAYOUT)
    columns = BYTES * codes_per_byte(code)
    start_column, end_column = (columns * index // part_of_k[1] for index in (part_of_k[0], part_of_k[0] + 1))
    group_size = (end_column - start_column) // num_scales if num_scales else columns
    scales_weights = _scales_weights(rows, num_scales, group_size, has_minimums=has_minimums)
    scales_sums = num_scales > 0 and not scales_weights
    is_small = scales_weights and code == "e2m1"
    factor_of_scales = 2.0**E2M1_EXPONENT / factor_of_sums(
        code, rows=rows, num_scales=num_scales, group_size=group_size, has_minimums=has_minimums
    )

    def run(_, sums, codes, slot, warpgroup, x, x_slot, *vectors):
        own = _Thread(codes, value_of(slot), value_of(warpgroup), is_gated=is_gated)
        scales = vectors[:num_scales]
        zeros = vectors[num_scales : 2 * num_scales] if has_zeros else None
        minimums = vectors[-num_scales:] if has_minimums else None
        registers = sums.registers.copy()
        acc = None

        def of_unit(vectors: Any, unit: int, *, added: float = 0.0, times: float = 1.0) -> list[list[Any]]:
            """Return for each 8 of UNIT columns in wgmma's order the pairs of either half, of their groups."""
            groups = sorted({(unit + column - start_column) // group_size for column in (0, UNIT // 2)})
            found = [[vectors[group].registers[at(0, half)] for half in range(2)] for group in groups]
            if len(found) == 2 and codes_per_byte(code) == 2:
                is_second = own.is_in_second_half
                found = [[arith.select(is_second, *halves[::-1]) for halves in zip(*found, strict=True)]]
            pairs = [[_pair_of(value, added=added, times=times) for value in halves] for halves in found]
            return [pairs[chunk * len(pairs) // 4] for chunk in range(UNIT // 8)]

        def operand(start: int) -> Any:
            """Return the weights of PIECE columns as wgmma takes them in registers."""
            a = registers_for(PIECE)
            for unit in range(start, start + PIECE, UNIT):
                minus = None if zeros is None else of_unit(zeros, unit, added=128.0)[0]
                factors = of_unit(scales, unit, times=factor_of_scales if is_small else 1.0) if scales_weights else None
                less = None if minimums is None else of_unit(minimums, unit)
                for chunk, pairs in enumerate(own.weights(unit, code, minus, is_small=is_small)):
                    for half, pair in enumerate(pairs):
                        value = pair
                        if factors is not None:
                            value = times(pair, factors[chunk][half], None if less is None else less[chunk][half])
                        a[at((unit - start) // 8 + chunk, half)] = utils.bitcast(
                            value, ir.VectorType.get((2,), ir.BF16Type.get())
                        )
            return matrix_of(a)

        batch = PIECE if code in MULTIPLIERS else BATCH  # their tables are in registers
        for first in range(start_column, end_column, batch):
            pieces = range(first, min(first + batch, end_column), PIECE)
            operands = [operand(start) for start in pieces]
            done = []
            if acc is None and not scales_sums:
                acc = mgpu.WGMMAAccumulator.from_registers(sums)
            for start, a in zip(pieces, operands, strict=True):
                if acc is None:
                    acc = mgpu.WGMMAAccumulator.zero(OUTPUTS, rows)
                piece = start // PIECE
                entry, tile = (
                    (arith.addi(value_of(x_slot), const_i32(piece)), 0)
                    if has_pieces_apart
                    else (value_of(x_slot), piece)
                )
                b = mgpu.memref_slice(x, (as_index(entry), slice(None), slice(tile, tile + 1)))
                acc = mgpu.wgmma(acc, a, mgpu.memref_transpose(b, (1, 0, 3, 2)), swizzle=128)
                if scales_sums and (start + PIECE) % group_size == 0:
                    done.append((acc, scales[(start - start_column) // group_size]))
                    acc = None
            nvvm.wgmma_commit_group_sync_aligned()
            nvvm.wgmma_wait_group_sync_aligned(0)
            if acc is not None:
                acc = mgpu.WGMMAAccumulator(
                    _value=mgpu.optimization_barrier(acc._value), _original_layout=acc._original_layout, _sync=False
                )
            for part, factors in done:
                values = mgpu.optimization_barrier(part._value).to_layout(mgpu.WGMMA_LAYOUT)
                for index, register in np.ndenumerate(values.registers):
                    factor = factors.registers[at(0, index[4])]
                    registers[index] = mlir_math.fma(register, factor, registers[index])
        if acc is not None:
            return acc.value
        return matrix_of(registers)

    return inline(run, _LAYOUT, _CODES, SCALAR, SCALAR, _ROWS, SCALAR, *vectors, out=out)


def _scales_weights(rows: int, num_scales: int, group_size: int, *, has_minimums: bool) -> bool:
    """Return true if scales multiply weights, rather than the sums of their groups."""
    return num_scales > 0 and (rows > MAX_ROWS_OF_SCALED_SUMS or group_size < PIECE or has_minimums)


def factor_of_sums(code: Code, *, rows: int, num_scales: int, group_size: int, has_minimums: bool = False) -> float:
    """Return what the sums of all blocks are to be multiplied by.

    Where scales multiply weights of e2m1, these are converted as 2^-E2M1_EXPONENT of their value, and the scales are
    multiplied by the square root of what is missing: by all of it bfloat16 could not represent those above 2. Values of
    tables are multiplied by their MULTIPLIERS.
    """
    if code == "e2m1" and _scales_weights(rows, num_scales, group_size, has_minimums=has_minimums):
        return 2.0 ** (E2M1_EXPONENT // 2)
    return 1 / MULTIPLIERS.get(code, 1.0)


def interleave_rows(ref: Any, slot: Any, code: Code) -> None:
    """Put the columns of the rows ref[slot], [rows, columns], into the order of a thread's codes, as one warpgroup.

    Of 8 columns in a word of 4-bit codes, pairs are 4 apart, and 4 of a lane's pairs are operands of two products; of 4
    columns in a word of bytes, pairs are 2 apart. What other warpgroups read needs `commit_smem` first.
    """
    tiles, column_tiles = ref.shape[1] // 8, ref.shape[2] // PIECE
    num_jobs = tiles * column_tiles * 2 * 8

    def run(_, ref, slot) -> None:
        own = thread()
        eight, words = (
            ir.VectorType.get((8,), ir.BF16Type.get()),
            ir.VectorType.get((4,), ir.IntegerType.get_signless(32)),
        )
        for first in range(0, num_jobs, 128):
            job = arith.addi(own, const_i32(first))
            row, unit = arith.remui(job, const_i32(8)), arith.divui(job, const_i32(8))
            half, tile = arith.remui(unit, const_i32(2)), arith.divui(unit, const_i32(2))
            column_tile, row_tile = (
                arith.remui(tile, const_i32(column_tiles)),
                arith.divui(tile, const_i32(column_tiles)),
            )

            def indices(chunk: int, half=half, row=row, row_tile=row_tile, column_tile=column_tile) -> list[Any]:
                chunk = arith.xori(arith.addi(arith.muli(half, const_i32(4)), const_i32(chunk)), row)
                column = arith.muli(chunk, const_i32(8))
                return [as_index(i) for i in (value_of(slot), row_tile, column_tile, row, column)]

            def interleave() -> None:
                loaded = [utils.bitcast(vector.load(eight, ref, indices(chunk)), words) for chunk in range(4)]
                found = [vector.extract(chunk, [], [i]) for chunk in loaded for i in range(4)]
                for chunk, values in enumerate(in_order_of_codes(found, code)):
                    stored = utils.bitcast(vector.from_elements(words, values), eight)
                    vector.store(stored, ref, indices(chunk))

            if num_jobs - first >= 128:
                interleave()
            else:
                with utils.when(arith.cmpi(arith.CmpIPredicate.ult, job, const_i32(num_jobs))):
                    interleave()

    inline(run, _ROWS, SCALAR)(ref, splat(slot))


def in_order_of_codes(words: list[Any], code: Code) -> list[list[Any]]:
    """Return UNIT columns of a row, four words of two for each 8, in the order of a thread's codes, see
    `interleave_rows`.
    """
    if codes_per_byte(code) == 2:  # a lane has the columns of a chunk
        lanes = [words[4 * lane : 4 * lane + 4] for lane in range(4)]
        pairs = [[rearranged(w[k], w[k + 2], s) for k in range(2) for s in ("0x5410", "0x7632")] for w in lanes]
        return [[pairs[lane][index] for lane in range(4)] for index in range(4)]
    chunks = []
    for start in range(0, 16, 8):  # of half a chunk
        lanes = [(words[start + 2 * lane], words[start + 2 * lane + 1]) for lane in range(4)]
        chunks += [[rearranged(a, b, s) for a, b in lanes] for s in ("0x5410", "0x7632")]
    return chunks


def own_tiles(warpgroup: Any, row: Any, *, is_gated: bool) -> tuple[list[Any], Any]:
    """Return which tiles of eight outputs of the ring of codes a lane's two are in, and which of a tile they are.

    `row` is the lane's first one in WGMMA layout.
    """
    warp, row = arith.divui(row, const_i32(16)), arith.remui(row, const_i32(16))
    own = arith.addi(arith.muli(warpgroup, const_i32(4)), warp)
    if is_gated:
        return [arith.addi(own, const_i32(16 * half)) for half in range(2)], row
    return [arith.addi(arith.muli(own, const_i32(2)), const_i32(half)) for half in range(2)], row


class _Thread:
    """What one thread reads of the ring of codes."""

    def __init__(self, codes: Any, slot: Any, warpgroup: Any, *, is_gated: bool) -> None:
        self.codes, self.slot = codes, as_index(slot)
        row, self.quarter = row_and_quarter()
        self.is_in_second_half = arith.cmpi(arith.CmpIPredicate.ugt, self.quarter, const_i32(1))
        tiles, self.row = own_tiles(warpgroup, row, is_gated=is_gated)
        self.tiles = [as_index(tile) for tile in tiles]

    def weights(self, start: int, code: Code, minus: list[Any] | None, *, is_small: bool) -> list[list[Any]]:
        """Return the pairs of UNIT columns: for each 8 of them in wgmma's order those of either half.

        With `is_small` they are 2^-E2M1_EXPONENT of their values.
        """
        if codes_per_byte(code) == 2:
            words = [self._word(half, start // 2) for half in range(2)]
            if code in MULTIPLIERS:
                return [list(pairs) for pairs in zip(*(pairs_of_table(word, code) for word in words), strict=True)]

            def pair(half: int, index: int) -> Any:
                if is_small:
                    return small_pair_of_e2m1(words[half], index)
                return pair_of_nibbles(words[half], index, code, None if minus is None else minus[half])

            return [[pair(half, index) for half in range(2)] for index in range(4)]
        pairs = []
        for first in range(start, start + UNIT, UNIT // 2):
            words = [self._word(half, first) for half in range(2)]
            pairs += [[pair_of_bytes(words[half], index, code) for half in range(2)] for index in range(2)]
        return pairs

    def _word(self, half: int, byte: int) -> Any:
        """Load 4 bytes of an output: those of this thread among 16 from `byte` on."""
        offset = arith.addi(
            arith.muli(arith.xori(self.row, const_i32(byte // 16)), const_i32(16)),
            arith.muli(self.quarter, const_i32(4)),
        )
        four = ir.VectorType.get((4,), ir.IntegerType.get_signless(8))
        indices = [self.slot, self.tiles[half], const_index(0), as_index(self.row), as_index(offset)]
        return utils.bitcast(vector.load(four, self.codes, indices), ir.IntegerType.get_signless(32))


def _pair_of(value: Any, *, added: float = 0.0, times: float = 1.0) -> Any:
    """Return an output's value times `times` plus `added`, twice in bfloat16, of a pair in float32."""
    f32 = ir.F32Type.get()
    if times != 1.0:
        value = arith.mulf(value, vector.broadcast(ir.VectorType.get((2,), f32), mgpu.c(times, f32)))
    if added:
        value = arith.addf(value, vector.broadcast(ir.VectorType.get((2,), f32), mgpu.c(added, f32)))
    return arith.truncf(ir.VectorType.get((2,), ir.BF16Type.get()), value)
