"""Codes in registers -> bfloat16 in registers, as operand A of wgmma: inlined Mosaic GPU code.

Values are bit-exact: bfloat16 holds every code of 4 and of 8 bits. Each function returns [64, 128] in WGMMA layout, in
which a thread has pairs of neighbouring columns of two rows, eight apart (`half`).
"""

from collections.abc import Callable
from typing import Any, Literal, cast

import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, memref, vector
from jax._src.lib.mlir.dialects import math as mlir_math
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quantized_matmuls.packing import BLOCK_COLUMNS, BLOCK_OUTPUTS, CODE_ROWS
from pallas_kernels.registers import row_and_quarter

Code = Literal["int4", "e2m1", "int8", "e4m3"]
"""How a code's bits mean a number; int4 is stored with 8 added to it."""

_LAYOUT = plgpu.Layout.WGMMA
_BLOCK = BLOCK_OUTPUTS, BLOCK_COLUMNS
_SCALAR = plgpu.Layout.WG_SPLAT((128,))
_RING = plgpu.RefType((cast(Any, plgpu.TilingTransform)((8, 128)), cast(Any, plgpu.SwizzleTransform)(128)))
_WORDS = plgpu.Layout.WG_STRIDED((CODE_ROWS, 32), vec_size=4)

_REGISTERS = "{ .reg .b32 a, m, s, v; "
# PTX that makes a pair of bfloat16, v, of a: two codes of 4 bits at the bottom of two halves.
_NIBBLES = {
    # 128 + code has the code in its lowest bits; 136 less is exact.
    "int4": "lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea; mov.b32 m, 0x43084308; sub.bf16x2 v, a, m;",
    # Sign, then exponent and mantissa at the bottom of bfloat16's exponent: times 2^126, its bias less that of e2m1.
    "e2m1": "shl.b32 s, a, 12; and.b32 s, s, 0x80008000; shl.b32 a, a, 6; lop3.b32 a, a, 0x01c001c0, s, 0xea; "
    "mov.b32 m, 0x7e807e80; mul.bf16x2 v, a, m;",
}
# The same of a: two codes of 8 bits.
_BYTES = {
    # In the high bytes of two halves: sign and the other 7 bits, then times 2^120.
    "e4m3": "prmt.b32 a, $1, 0, 0x1404; and.b32 s, a, 0x80008000; shr.u32 a, a, 4; lop3.b32 a, a, 0x07f007f0, s, 0xea; "
    "mov.b32 m, 0x7b807b80; mul.bf16x2 v, a, m;",
    # In the low bytes: 128 + the lowest 7 bits, less 128 or, if the sign is set, 256.
    "int8": "prmt.b32 a, $1, 0, 0x4140; lop3.b32 m, a, 0x00800080, 0x43004300, 0xea; "
    "lop3.b32 a, a, 0x007f007f, 0x43004300, 0xea; sub.bf16x2 v, a, m;",
}


def from_words(code: Code, *, scale_rows: int) -> Callable[..., Any]:
    """Return a function of a block's words, read as `_WORDS`, and the ref of its rows of scales, if there are any.

    With `scale_rows` of them each value is multiplied by the scale of its output and quantization group.
    """
    out = plgpu.ShapeDtypeStruct(_BLOCK, jnp.bfloat16, layout=_LAYOUT)
    args = (_WORDS, plgpu.RefType()) if scale_rows else (_WORDS,)

    @cast(Any, plgpu.inline_mgpu)(arg_types=args, return_type=out)
    def run(_, words, *scales):
        shape = mgpu.WGMMA_LAYOUT.registers_shape(_BLOCK)
        registers = np.empty(shape, dtype=object)
        values = [vector.extract(r, [], [i]) for r in words.registers.flat for i in range(4)]
        splat = _scale_pairs(scales[0], scale_rows) if scale_rows else None
        for number, index in enumerate(np.ndindex(*shape)):
            word, part = values[number // 4], number % 4
            text = _REGISTERS + (f"shr.u32 a, $1, {4 * part}; " if part else "mov.b32 a, $1; ")
            if code == "e2m1":
                text += "and.b32 a, a, 0x000f000f; "
            text += _NIBBLES[code]
            operands = [word]
            if splat is not None:
                group = number * scale_rows // len(registers.flat)
                operands.append(splat[group][_half(index, shape)])
            text += "mul.bf16x2 $0, v, $2; }" if len(operands) == 2 else "mov.b32 $0, v; }"
            registers[index] = _pair(_asm(operands, text))
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return run


def from_bytes(code: Code, *, is_gated: bool, is_scaled: bool) -> Callable[..., Any]:
    """Return a function of the ring of plain weights [slots, 256, 128], the slot and the warpgroup, for its block.

    The ring is read as TMA leaves it, in swizzled tiles of 8 outputs by 128 bytes. The block has 64 outputs in a row,
    or if `is_gated` 32 of the first 128, which are gate, and the same of the others, which are up, in turns of eight.
    If `is_scaled` the function also takes a factor for each output, [64, 8] with equal columns, which is rounded to
    bfloat16.
    """
    out = plgpu.ShapeDtypeStruct(_BLOCK, jnp.bfloat16, layout=_LAYOUT)

    args = (_RING, _SCALAR, _SCALAR, *((_LAYOUT,) if is_scaled else ()))

    @cast(Any, plgpu.inline_mgpu)(arg_types=args, return_type=out)
    def run(_, ring, slot, warpgroup, *factors):
        i8, i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 16, 32))
        two = ir.VectorType.get((2,), i8)
        row, quarter = row_and_quarter()
        warp, row = arith.divui(row, _i32(16)), arith.remui(row, _i32(16))
        [slot], [warpgroup] = slot.registers.flat, warpgroup.registers.flat
        tiles = []
        for half in range(2):
            if is_gated:
                tile = arith.addi(arith.addi(arith.muli(warpgroup, _i32(4)), warp), _i32(16 * half))
            else:
                tile = arith.addi(arith.muli(arith.addi(arith.muli(warpgroup, _i32(4)), warp), _i32(2)), _i32(half))
            tiles.append(_index(tile))
        own = arith.muli(quarter, _i32(2))
        scales = []
        for half in range(2) if is_scaled else ():
            factor = factors[0].registers[0, 0, 0, 0, half, 0, 0, 0, 0]
            value = arith.truncf(ir.VectorType.get((2,), ir.BF16Type.get()), factor)
            scales.append([utils.bitcast(value, i32)])
        shape = mgpu.WGMMA_LAYOUT.registers_shape(_BLOCK)
        registers = np.empty(shape, dtype=object)
        for index in np.ndindex(*shape):
            column = 8 * index[1]
            swizzled = arith.muli(arith.xori(row, _i32(column // 16)), _i32(16))
            place = _index(arith.addi(arith.addi(swizzled, own), _i32(column % 16)))
            zero = arith.constant(ir.IndexType.get(), 0)
            value = vector.load(two, ring, [_index(slot), tiles[_half(index, shape)], zero, _index(row), place])
            word = arith.extui(i32, utils.bitcast(value, i16))
            text = _REGISTERS + _BYTES[code] + ("mul.bf16x2 $0, v, $2; }" if scales else "mov.b32 $0, v; }")
            registers[index] = _pair(_asm([word, *scales[_half(index, shape)]] if scales else [word], text))
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return run


def add_scaled_by(columns: int) -> Callable[..., Any]:
    """Return a function total + part * factors of [64, columns], whose factors are [64, 8] with equal columns."""
    out = plgpu.ShapeDtypeStruct((BLOCK_OUTPUTS, columns), jnp.float32, layout=_LAYOUT)

    @cast(Any, plgpu.inline_mgpu)(arg_types=(_LAYOUT, _LAYOUT, _LAYOUT), return_type=out)
    def run(_, total, part, factors):
        factors = [factors.registers[0, 0, 0, 0, half, 0, 0, 0, 0] for half in range(2)]
        registers = total.registers.copy()
        for index, register in np.ndenumerate(part.registers):
            factor = factors[_half(index, part.registers.shape)]
            registers[index] = mlir_math.fma(register, factor, registers[index])
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return run


def add_scaled(columns: int) -> Callable[..., Any]:
    """Return a function total + part * scale of [64, columns], whose outputs' scales are the ref of a row of words."""
    out = plgpu.ShapeDtypeStruct((BLOCK_OUTPUTS, columns), jnp.float32, layout=_LAYOUT)

    @cast(Any, plgpu.inline_mgpu)(arg_types=(_LAYOUT, _LAYOUT, plgpu.RefType()), return_type=out)
    def run(_, total, part, scales):
        f32 = ir.F32Type.get()
        pair = ir.VectorType.get((2,), f32)
        word = _own_word(scales)
        factors = [arith.shli(word, _i32(16)), arith.andi(word, _i32(-65536))]
        factors = [vector.broadcast(pair, utils.bitcast(factor, f32)) for factor in factors]
        registers = total.registers.copy()
        for index, register in np.ndenumerate(part.registers):
            factor = factors[_half(index, part.registers.shape)]
            registers[index] = mlir_math.fma(register, factor, registers[index])
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return run


def _scale_pairs(scales: Any, rows: int) -> list[list[Any]]:
    """Of each row, the scale of either half of a thread's rows, twice in a word."""
    words = [_own_word(scales, row) for row in range(rows)]
    return [[_asm([word], f"prmt.b32 $0, $1, 0, {both};") for both in ("0x1010", "0x3232")] for word in words]


def _own_word(scales: Any, row: int | None = None) -> Any:
    thread = arith.remui(mgpu.utils.thread_idx(), _i32(128))
    index = _index(arith.divui(thread, _i32(4)))
    if row is None:
        return memref.load(scales, [index])
    return memref.load(scales, [arith.constant(ir.IndexType.get(), row), index])


def _half(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    [axis] = [axis for axis in range(2, len(shape)) if shape[axis] == 2]
    return index[axis]


def _asm(operands: list[Any], text: str) -> Any:
    return llvm.inline_asm(ir.IntegerType.get_signless(32), operands, text, "=r" + ",r" * len(operands))


def _pair(word: Any) -> Any:
    return utils.bitcast(word, ir.VectorType.get((2,), ir.BF16Type.get()))


def _index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)


def _i32(value: int) -> Any:
    return mgpu.c(value, ir.IntegerType.get_signless(32))
