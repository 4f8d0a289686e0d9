"""Rows in global memory that become operand B of a product of codes, their columns in the order of a thread's codes:
inlined Mosaic GPU code of one warpgroup.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.codes import Code
from pallas_kernels.device.mlir import (
    REF,
    SCALAR,
    const_i32,
    elements_of,
    inline,
    splat,
    strided,
    thread,
    value_of,
    vector_of,
)
from pallas_kernels.device.product_of_codes import PIECE, UNIT, in_order_of_codes
from pallas_kernels.device.swizzled import tiled
from pallas_kernels.jax_internals import arith, ir, llvm

_THREADS = 128
_CHUNK = 8
"""Columns that are loaded or stored at a time, of which UNIT // _CHUNK are put in order together."""
_CHUNK_BYTES, _ROW_BYTES = 2 * _CHUNK, 2 * PIECE
_MOST_TURNS = 2
"""Turns in which a step's units are loaded, of as few of a thread as that takes."""


class RowTiles(NamedTuple):
    """Tiles of rows, and of their columns those of a step."""

    rows: int
    pieces: int
    """Pieces of PIECE columns of a step."""
    code: Code
    block: int | None = None
    """Columns of which a unit has as many of each quarter, or None if those of a unit are in a row."""

    @property
    def columns(self) -> int:
        """Columns of a step."""
        return self.pieces * PIECE

    @property
    def num_units(self) -> int:
        """Units of a step."""
        return self.rows * self.columns // UNIT

    @property
    def units(self) -> int:
        """Units of a thread in a turn."""
        return -(-self.num_units // (_THREADS * _MOST_TURNS))

    @property
    def turns(self) -> int:
        """Number of turns in which the warpgroup has all units of a step."""
        return -(-self.num_units // (_THREADS * self.units))


def load_rows(x: Any, row: Any, step: Any, turn: int, tiles: RowTiles) -> Any:
    """Return the rows of x, [M, K], from `row` on in registers, those of a turn and a step; zeros beyond the last
    column.
    """
    num_words = UNIT // 2 * tiles.units
    layout = plgpu.Layout.WG_STRIDED((_THREADS * num_words,), 4)
    num_rows, depth = x.shape

    def run(_, x, row, step):
        i16, i64 = (ir.IntegerType.get_signless(bits) for bits in (16, 64))
        pointer = utils.memref_ptr(x)
        start = arith.muli(value_of(step), const_i32(tiles.columns))
        loaded = []
        for index in range(tiles.units):
            row_tile, within, unit = _unit(turn * tiles.units + index, tiles)
            own = arith.addi(arith.addi(value_of(row), within), arith.muli(row_tile, const_i32(8)))
            own = arith.extui(i64, arith.minsi(own, const_i32(num_rows - 1)))
            if tiles.block is None:
                column, distance = arith.muli(unit, const_i32(UNIT)), _CHUNK
            else:
                units = const_i32(tiles.block // UNIT)
                block, place = arith.divui(unit, units), arith.remui(unit, units)
                column = arith.addi(arith.muli(block, const_i32(tiles.block)), arith.muli(place, const_i32(_CHUNK)))
                distance = tiles.block // 4
            column = arith.addi(column, start)
            offset = arith.addi(arith.muli(own, utils.c(depth, i64)), arith.extui(i64, column))
            place = utils.getelementptr(pointer, [offset], i16)
            for chunk in range(4):
                is_there = arith.cmpi(
                    arith.CmpIPredicate.slt, arith.addi(column, const_i32(chunk * distance)), const_i32(depth)
                )
                if tiles.num_units < _THREADS * tiles.units * tiles.turns:
                    is_own = arith.cmpi(arith.CmpIPredicate.ult, thread(), const_i32(tiles.num_units))
                    is_there = arith.andi(is_there, is_own)
                loaded.append(_load_or_zeros(place, 2 * chunk * distance, is_there))
        return strided(loaded, layout)

    out = plgpu.ShapeDtypeStruct((_THREADS * num_words,), jnp.int32, layout=layout)
    return inline(run, REF, SCALAR, SCALAR, out=out)(x, splat(row), splat(step))


def put_rows(loaded: Any, ref: Any, first_piece: Any, turn: int, tiles: RowTiles) -> None:
    """Store what `load_rows` has returned into ref[first_piece : first_piece + pieces], [rows, PIECE] each.

    What other warpgroups read needs `commit_smem` first.
    """
    layout = plgpu.Layout.WG_STRIDED((_THREADS * UNIT // 2 * tiles.units,), 4)

    def run(_, loaded, ref, first_piece) -> None:
        pointer = utils.memref_ptr(ref)
        first = arith.muli(value_of(first_piece), const_i32(tiles.rows * _ROW_BYTES))
        for index in range(tiles.units):
            row_tile, within, unit = _unit(turn * tiles.units + index, tiles)
            piece = arith.muli(arith.divui(unit, const_i32(2)), const_i32(tiles.rows * _ROW_BYTES))
            row = arith.addi(arith.muli(row_tile, const_i32(8)), within)
            chunk = arith.xori(arith.muli(arith.remui(unit, const_i32(2)), const_i32(4)), within)
            own = arith.addi(piece, arith.muli(row, const_i32(_ROW_BYTES)))
            own = arith.addi(own, arith.muli(chunk, const_i32(_CHUNK_BYTES)))
            words = [word for each in loaded.registers[4 * index : 4 * index + 4] for word in elements_of(each, 4)]

            def store(words=words, own=own) -> None:
                for chunk, values in enumerate(in_order_of_codes(words, tiles.code)):
                    offset = arith.addi(first, arith.xori(own, const_i32(chunk * _CHUNK_BYTES)))
                    place = utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))
                    llvm.store(vector_of(values), place, alignment=_CHUNK_BYTES)

            if tiles.num_units < _THREADS * tiles.units * tiles.turns:
                with utils.when(arith.cmpi(arith.CmpIPredicate.ult, thread(), const_i32(tiles.num_units))):
                    store()
            else:
                store()

    inline(run, layout, plgpu.RefType(tiled(PIECE)), SCALAR)(loaded, ref, splat(first_piece))


def _unit(index: int, tiles: RowTiles) -> tuple[Any, Any, Any]:
    """Return the tile of eight rows, the row in it and the unit of columns of a thread's `index`-th unit."""
    own = arith.addi(thread(), const_i32(index * _THREADS))
    within, other = arith.remui(own, const_i32(8)), arith.divui(own, const_i32(8))
    per_row = const_i32(tiles.columns // UNIT)
    return arith.divui(other, per_row), within, arith.remui(other, per_row)


def _load_or_zeros(pointer: Any, num_bytes: int, is_there: Any) -> Any:
    """Return four words, so many bytes behind a pointer to what does not change meanwhile, or zeros."""
    i32 = ir.IntegerType.get_signless(32)
    zeros = "".join(f"mov.b32 ${i}, 0; " for i in range(4))
    load = f"@p ld.global.nc.v4.b32 {{$0, $1, $2, $3}}, [$4+{num_bytes}]; "
    found = llvm.inline_asm(
        llvm.StructType.get_literal([i32] * 4),
        [llvm.ptrtoint(ir.IntegerType.get_signless(64), pointer), arith.extui(i32, is_there)],
        f"{{ .reg .pred p; setp.ne.b32 p, $5, 0; {zeros}{load}}}",
        "=&r,=&r,=&r,=&r,l,r",
    )
    return vector_of([llvm.extractvalue(i32, found, [i]) for i in range(4)])
