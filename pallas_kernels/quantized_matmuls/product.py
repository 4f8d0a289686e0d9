"""The product of a block of weights, as TMA stores its codes in shared memory, and a few rows: inlined Mosaic GPU code.

mma.sync multiplies 16 outputs by 8 rows over 16 columns. Any 16 columns may be chosen, if both operands agree: a thread
takes those that are in the same word of codes, so that nothing is shuffled. Results are the registers of WGMMA layout,
[64 outputs, rows]. A wgmma of 64 outputs would take at least 16 cycles for eight rows, mma.sync takes a few.
"""

from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.jax_internals import arith, ir, llvm, mlir_math, vector
from pallas_kernels.quantized_matmuls.codes import (
    Code,
    codes_per_byte,
    pair_of_bytes,
    pair_of_nibbles,
    rearranged,
    times,
)
from pallas_kernels.registers import row_and_quarter

OUTPUTS = 64
"""Outputs of a block, one block per warpgroup."""
BYTES = 128
"""Bytes of codes per output in a block."""
UNIT = 32
"""Columns that are multiplied at a time, the fewest that may have a scale."""
MAX_ROWS_OF_SCALED_SUMS = 32
"""With more rows there are too few registers for the sums of a group apart: rounded scales multiply the weights."""

_LAYOUT = plgpu.Layout.WGMMA
_SCALAR = plgpu.Layout.WG_SPLAT((128,))
_SWIZZLE = cast(Any, plgpu.SwizzleTransform)(128)
_CODES = plgpu.RefType((cast(Any, plgpu.TilingTransform)((8, 128)), _SWIZZLE))
_ROWS = plgpu.RefType((cast(Any, plgpu.TilingTransform)((8, 64)), _SWIZZLE))
_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)


def add_product(code: Code, *, rows: int, is_gated: bool, num_scales: int, has_zeros: bool) -> Callable[..., Any]:
    """Return a function that adds a block's product to sums [64, rows] of float32.

    Its arguments are the sums; the ring of codes, [slots, 256, 128] bytes, its slot and the warpgroup, which has 64
    consecutive outputs or, if `is_gated`, 32 of the first 128, which are gate, and the same of the others, which are
    up, alternating every eight; the ring of rows, [slots, rows, columns] of bfloat16, and its slot; `num_scales`
    factors for equal parts of the block's columns, [64, 8] with equal columns; and as many zero points, if there are
    any. Without scales the sums are those of codes.
    """
    vectors = (_LAYOUT,) * (num_scales * (1 + has_zeros))
    out = plgpu.ShapeDtypeStruct((OUTPUTS, rows), jnp.float32, layout=_LAYOUT)
    columns = BYTES * codes_per_byte(code)
    scales_weights = num_scales > 0 and rows > MAX_ROWS_OF_SCALED_SUMS

    @cast(Any, plgpu.inline_mgpu)(
        arg_types=(_LAYOUT, _CODES, _SCALAR, _SCALAR, _ROWS, _SCALAR, *vectors), return_type=out
    )
    def run(_, sums, codes, slot, warpgroup, x, x_slot, *vectors):
        own = _Thread(codes, _only(slot), _only(warpgroup), x, _only(x_slot), is_gated=is_gated)
        scales, zeros = vectors[:num_scales], vectors[num_scales:]
        total, sums_of_group = sums.registers.copy(), {}
        for start in range(0, columns, UNIT):
            group = start * num_scales // columns
            minus = [_pair_of(zeros[group], half, 128.0) for half in range(2)] if has_zeros else None
            a = own.weights(start, code, minus)
            part = total
            if scales_weights:
                factors = [_pair_of(scales[group], half) for half in range(2)]
                a = [[times(pair, factors[index % 2]) for index, pair in enumerate(operand)] for operand in a]
            elif num_scales and start * num_scales % columns == 0:
                sums_of_group = {_at(chunk, half): _zeros() for chunk in range(rows // 8) for half in range(2)}
            if num_scales and not scales_weights:
                part = sums_of_group
            for chunk in range(rows // 8):
                for operand, b in zip(a, own.rows(chunk, start, code), strict=True):
                    _multiply_add(part, chunk, operand, b)
            if part is not total and (start + UNIT) * num_scales % columns == 0:
                for place, register in part.items():
                    factor = scales[group].registers[_at(0, place[4])]
                    total[place] = mlir_math.fma(register, factor, total[place])
        return mgpu.FragmentedArray(_registers=total, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return run


class _Thread:
    """The reads of one thread from the rings."""

    def __init__(self, codes: Any, slot: Any, warpgroup: Any, x: Any, x_slot: Any, *, is_gated: bool) -> None:
        self.codes, self.x = codes, x
        self.slot, self.x_slot = _index(slot), _index(x_slot)
        row, self.quarter = row_and_quarter()
        warp, self.row = arith.divui(row, _i32(16)), arith.remui(row, _i32(16))
        own = arith.addi(arith.muli(warpgroup, _i32(4)), warp)
        if is_gated:
            tiles = [arith.addi(own, _i32(16 * half)) for half in range(2)]
        else:
            tiles = [arith.addi(arith.muli(own, _i32(2)), _i32(half)) for half in range(2)]
        self.tiles = [_index(tile) for tile in tiles]

    def weights(self, start: int, code: Code, minus: list[Any] | None) -> list[list[Any]]:
        """Return operand A of the two products over UNIT columns: of each k the pairs of either half, and again."""
        if codes_per_byte(code) == 2:
            words = [self._word(half, start // 2) for half in range(2)]

            def pair(half: int, index: int) -> Any:
                return pair_of_nibbles(words[half], index, code, None if minus is None else minus[half])

            return [[pair(half, 2 * k + j) for j in range(2) for half in range(2)] for k in range(2)]
        operands = []
        for k in range(2):
            words = [self._word(half, start + 16 * k) for half in range(2)]
            operands.append([pair_of_bytes(words[half], j, code) for j in range(2) for half in range(2)])
        return operands

    def rows(self, chunk: int, start: int, code: Code) -> list[list[Any]]:
        """Return operand B of the same columns and 8 rows: two pairs for each k."""
        if codes_per_byte(code) == 2:  # of 8 columns in a row, pairs that are 4 apart
            x = self._row(chunk, start, 8)
            return [[rearranged(x[k], x[k + 2], selector) for selector in ("0x5410", "0x7632")] for k in range(2)]
        return [self._row(chunk, start + 16 * k, 4) for k in range(2)]

    def _word(self, half: int, byte: int) -> Any:
        """Load 4 bytes of an output: those of this thread among 16 from `byte` on."""
        place = arith.addi(
            arith.muli(arith.xori(self.row, _i32(byte // 16)), _i32(16)), arith.muli(self.quarter, _i32(4))
        )
        four = ir.VectorType.get((4,), ir.IntegerType.get_signless(8))
        indices = [self.slot, self.tiles[half], _constant(0), _index(self.row), _index(place)]
        return utils.bitcast(vector.load(four, self.codes, indices), ir.IntegerType.get_signless(32))

    def _row(self, chunk: int, start: int, number: int) -> list[Any]:
        """Load `number` values of a row, this thread's among four times as many from `start` on, as words of two."""
        tile, column = divmod(start, 64)
        column = arith.addi(_i32(column), arith.muli(self.quarter, _i32(number)))
        swizzled = arith.muli(arith.xori(arith.divui(column, _i32(8)), self.row), _i32(8))
        place = arith.addi(swizzled, arith.remui(column, _i32(8)))
        values = ir.VectorType.get((number,), ir.BF16Type.get())
        indices = [self.x_slot, _constant(chunk), _constant(tile), _index(self.row), _index(place)]
        words = ir.VectorType.get((number // 2,), ir.IntegerType.get_signless(32))
        loaded = utils.bitcast(vector.load(values, self.x, indices), words)
        return [vector.extract(loaded, [], [i]) for i in range(number // 2)]


def _multiply_add(part: Any, chunk: int, a: list[Any], b: list[Any]) -> None:
    """Add a product over 16 columns to the registers of 8 rows."""
    f32 = ir.F32Type.get()
    pair = ir.VectorType.get((2,), f32)
    c = [vector.extract(part[_at(chunk, half)], [], [i]) for half in range(2) for i in range(2)]
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    d = llvm.inline_asm(llvm.StructType.get_literal([f32] * 4), [*a, *b, *c], _MMA, constraints)
    d = [llvm.extractvalue(f32, d, [i]) for i in range(4)]
    for half in range(2):
        part[_at(chunk, half)] = vector.from_elements(pair, d[2 * half : 2 * half + 2])


def _pair_of(vectors: Any, half: int, added: float = 0.0) -> Any:
    """Return an output's value plus `added`, twice in bfloat16."""
    f32 = ir.F32Type.get()
    value = vectors.registers[_at(0, half)]
    if added:
        value = arith.addf(value, vector.broadcast(ir.VectorType.get((2,), f32), mgpu.c(added, f32)))
    return arith.truncf(ir.VectorType.get((2,), ir.BF16Type.get()), value)


def _zeros() -> Any:
    f32 = ir.F32Type.get()
    return vector.broadcast(ir.VectorType.get((2,), f32), mgpu.c(0.0, f32))


def _only(scalar: Any) -> Any:
    [value] = scalar.registers.flat
    return value


def _at(chunk: int, half: int) -> tuple[int, ...]:
    return 0, chunk, 0, 0, half, 0, 0, 0, 0


def _i32(value: int) -> Any:
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _constant(value: int) -> Any:
    return arith.constant(ir.IndexType.get(), value)


def _index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)
