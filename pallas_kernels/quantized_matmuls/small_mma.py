"""Products with few rows by the tensor core's older instruction, mma.sync: inlined Mosaic GPU code.

A wgmma of 64 outputs takes at least 16 cycles whatever its number of rows, for so long it reads operand A's registers.
With 8 or 16 rows mma.sync is faster, and being synchronous it needs no second set of registers. Operands and results
are the registers of WGMMA layout; rows are read from shared memory as TMA leaves them there, swizzled by 128 bytes.
"""

from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quantized_matmuls.packing import BLOCK_COLUMNS, BLOCK_OUTPUTS
from pallas_kernels.registers import row_and_quarter

_LAYOUT = plgpu.Layout.WGMMA
_SCALAR = plgpu.Layout.WG_SPLAT((128,))
_RING = plgpu.RefType((cast(Any, plgpu.TilingTransform)((8, 64)), cast(Any, plgpu.SwizzleTransform)(128)))
_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)
_COLUMNS = 64
"""Columns of a tile of rows in shared memory, which are 128 bytes."""


def add_product(rows: int, first_column: int) -> Callable[..., Any]:
    """Return a function sums [64, rows] + a [64, 128] @ x^T, of x the ring's slot [rows, first_column : + 128].

    It takes sums, a, the ring of [slots, rows, columns] in tiles of 8 x 64, and the slot.
    """
    out = plgpu.ShapeDtypeStruct((BLOCK_OUTPUTS, rows), jnp.float32, layout=_LAYOUT)

    @cast(Any, plgpu.inline_mgpu)(arg_types=(_LAYOUT, _LAYOUT, _RING, _SCALAR), return_type=out)
    def run(_, sums, a, ring, slot):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        pair, two = ir.VectorType.get((2,), f32), ir.VectorType.get((2,), ir.BF16Type.get())
        results = llvm.StructType.get_literal([f32] * 4)
        row, quarter = row_and_quarter()
        row = arith.remui(row, _i32(8))
        own = arith.muli(quarter, _i32(2))
        index = arith.index_cast(ir.IndexType.get(), row)
        [slot] = slot.registers.flat
        slot = arith.index_cast(ir.IndexType.get(), slot)
        registers = sums.registers.copy()
        for k in range(0, BLOCK_COLUMNS, 16):
            operand = [utils.bitcast(a.registers[_at(k // 8 + j, half)], i32) for j in range(2) for half in range(2)]
            for chunk in range(rows // 8):
                b = []
                for column in (first_column + k, first_column + k + 8):
                    tile, chunk_of_row = divmod(column, _COLUMNS)
                    swizzled = arith.muli(arith.xori(row, _i32(chunk_of_row // 8)), _i32(8))
                    place = arith.index_cast(ir.IndexType.get(), arith.addi(swizzled, own))
                    value = vector.load(two, ring, [slot, _constant(chunk), _constant(tile), index, place])
                    b.append(utils.bitcast(value, i32))
                c = [vector.extract(registers[_at(chunk, half)], [], [i]) for half in range(2) for i in range(2)]
                constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
                d = llvm.inline_asm(results, [*operand, *b, *c], _MMA, constraints)
                d = [llvm.extractvalue(f32, d, [i]) for i in range(4)]
                for half in range(2):
                    registers[_at(chunk, half)] = vector.from_elements(pair, d[2 * half : 2 * half + 2])
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return run


def _at(chunk: int, half: int) -> tuple[int, ...]:
    return 0, chunk, 0, 0, half, 0, 0, 0, 0


def _i32(value: int) -> Any:
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _constant(value: int) -> Any:
    return arith.constant(ir.IndexType.get(), value)
