"""Device operations of the wide kernel that Pallas lacks: inlined Mosaic GPU code.

A warpgroup multiplies 64 outputs at a time, or 32 of gate and the same of up in turns of eight. Their codes become
operand A of wgmma in registers, in the order of columns that wgmma has: rows, operand B, stay as TMA copies them.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.codes import (
    MULTIPLIERS,
    Code,
    codes_per_byte,
    pair_of_bytes,
    pair_of_nibbles,
    pair_of_table,
    rearranged,
    times,
)
from pallas_kernels.device.mlir import REF, SCALAR, as_index, const_i32, inline, splat, thread, value_of, vector_of
from pallas_kernels.device.product_of_codes import BYTES, OUTPUTS, PIECE
from pallas_kernels.device.registers import at, chunk_of, halves, matrix_of, registers_for, row_and_quarter
from pallas_kernels.device.swizzled import tiled
from pallas_kernels.grouped_codes.device import (
    COLUMNS,
    load_words,
    output_of,
    own_output,
    store_rows,
    vectors_of,
    zeros,
)
from pallas_kernels.jax_internals import arith, ir, llvm, nvvm, vector

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

_LAYOUT = plgpu.Layout.WGMMA
_ROWS = plgpu.RefType(tiled(PIECE))
_CODES = plgpu.RefType(tiled(BYTES, itemsize=1)[1:])
_E2M1 = (
    # Multiplied, a byte's two codes are where the signs, and where the other bits of a pair of bfloat16 are taken from.
    "{ .reg .b32 s, m; mul.lo.u32 s, $1, 0x01001000; and.b32 s, s, 0x80008000; mul.lo.u32 m, $1, 0x00040040; "
    "lop3.b32 m, m, 0x01c001c0, s, 0xea; mov.b32 s, 0x7e807e80; mul.bf16x2 $0, m, s; }"
)


def load_scales(ref: Any, base: Any, first: Any, column: Any, *, num_outputs: int, is_gated: bool, groups: int) -> Any:
    """Return the bits of the scales ref[base + outputs, column : column + groups] of outputs from `first` on.

    `groups` is 1, 2 or, of 16 bits, 4: the columns of a piece that have scales of their own. The result, [64, 8] of 32
    bits, is for `operand` of the same scales only: nothing waits for the loads before that. Beyond the last output or
    column that is repeated.
    """
    size = jnp.dtype(ref.dtype).itemsize
    num_columns = ref.shape[1]
    out = plgpu.ShapeDtypeStruct((OUTPUTS, COLUMNS), jnp.float32, layout=_LAYOUT)
    is_packed = _is_packed(ref.dtype, num_columns, groups)

    def run(_, ref, base, first, column):
        i64 = ir.IntegerType.get_signless(64)
        start = utils.memref_ptr(ref)

        def load(output: Any, column: Any, size: int) -> Any:
            element = arith.addi(arith.muli(output, const_i32(num_columns)), column)
            offset = arith.muli(arith.extui(i64, element), mgpu.c(jnp.dtype(ref_dtype).itemsize, i64))
            place = llvm.ptrtoint(i64, start)
            text = f"ld.global.nc.u{8 * size} $0, [$1];"
            return llvm.inline_asm(
                ir.IntegerType.get_signless(32),
                [arith.addi(place, offset)],
                text,
                "=r,l",
                has_side_effects=True,
            )

        registers = []
        for half in range(2):
            output = output_of(value_of(first), half, num_outputs=num_outputs, is_gated=is_gated)
            output = arith.addi(value_of(base), output)
            last = const_i32(num_columns - 1)
            if is_packed:
                found = [
                    load(
                        output,
                        arith.minsi(arith.addi(value_of(column), const_i32(group)), const_i32(num_columns - 2)),
                        2 * size,
                    )
                    for group in range(0, groups, 2)
                ]
            else:
                found = [
                    load(output, arith.minsi(arith.addi(value_of(column), const_i32(group)), last), size)
                    for group in range(groups)
                ]
            registers.append(vector_of([utils.bitcast(bits, ir.F32Type.get()) for bits in (found * 2)[:2]]))
        return chunk_of(registers)

    ref_dtype = ref.dtype
    return inline(run, REF, *[SCALAR] * 3, out=out)(ref, *map(splat, (base, first, column)))


def _is_packed(dtype: Any, num_columns: int, groups: int) -> bool:
    """Return true if two scales are loaded at once."""
    return groups % 2 == 0 and num_columns % 2 == 0 and jnp.dtype(dtype).itemsize <= 2


def operand(
    codes: Any,
    slot: Any,
    block: Any,
    piece: Any,
    scales: Any = None,
    zeros: Any = None,
    minimums: Any = None,
    *,
    code: Code,
    is_gated: bool,
    groups: int,
    num_columns: int,
    dtypes: dict[str, Any],
) -> Any:
    """Return the values of PIECE columns of 64 outputs in bfloat16, [64, PIECE]: (code - zero) * scale - minimum.

    `codes` is the ring [slots, outputs, 128] of bytes; `block` counts its blocks of 64 outputs, or of 32 in both halves
    of the outputs, gate and up; `piece` counts the columns in it. `scales`, `zeros` and `minimums` are what
    `load_scales` returned for matrices of `dtypes` with `num_columns` columns.
    """
    ring_outputs = codes.shape[1]
    out = plgpu.ShapeDtypeStruct((OUTPUTS, PIECE), jnp.bfloat16, layout=_LAYOUT)
    given = {"scales": scales, "zeros": zeros, "minimums": minimums}
    given = {name: vectors for name, vectors in given.items() if vectors is not None}
    names = list(given)

    def run(_, codes, slot, block, piece, *vectors):
        row, quarter = row_and_quarter()
        within = arith.remui(row, const_i32(8))
        pair_of = _pairs_of_nibbles if codes_per_byte(code) == 2 else _pairs_of_bytes
        places = pair_of(within, quarter, value_of(piece))
        a = registers_for(PIECE)
        for half in range(2):
            output = own_output(half, is_gated=is_gated)
            own = arith.addi(arith.muli(value_of(block), const_i32(32 if is_gated else 64)), output)
            own = arith.addi(own, const_i32(half * ring_outputs // 2 if is_gated else 0))

            def pairs(name: str, half: int = half, *, added: float = 0.0) -> list[Any]:
                """Return what a matrix has for each group of the half."""
                if name not in names:
                    return [None] * groups
                found = vectors[names.index(name)]
                return [_pair(found, half, g, dtypes[name], num_columns, groups, added=added) for g in range(groups)]

            factors, minus, less = pairs("scales"), pairs("zeros", added=128.0), pairs("minimums")
            for chunk, place in enumerate(places):
                group = chunk * groups // len(places)
                value = _value(codes, value_of(slot), own, place, code, minus[group] if groups else None)
                if groups:
                    value = times(value, factors[group], less[group])
                a[at(chunk, half)] = utils.bitcast(value, ir.VectorType.get((2,), ir.BF16Type.get()))
        return matrix_of(a)

    scalars = map(splat, (slot, block, piece))
    types = (_CODES, *[SCALAR] * 3, *[_LAYOUT] * len(given))
    return inline(run, *types, out=out)(codes, *scalars, *given.values())


def _pairs_of_nibbles(within: Any, quarter: Any, piece: Any) -> list[Any]:
    """Return the byte in an output's 128 of each pair of columns that a lane has in a piece."""
    chunk = arith.muli(piece, const_i32(2))
    starts = [_chunk_place(within, arith.addi(chunk, const_i32(i))) for i in range(2)]
    return [arith.addi(arith.addi(starts[j // 4], const_i32(4 * (j % 4))), quarter) for j in range(8)]


def _pairs_of_bytes(within: Any, quarter: Any, piece: Any) -> list[Any]:
    """Return the same for codes of a byte."""
    chunk, pair = arith.muli(piece, const_i32(4)), arith.muli(quarter, const_i32(2))
    starts = [_chunk_place(within, arith.addi(chunk, const_i32(i))) for i in range(4)]
    return [arith.addi(arith.addi(starts[j // 2], const_i32(8 * (j % 2))), pair) for j in range(8)]


def _chunk_place(within: Any, chunk: Any) -> Any:
    """Return where TMA has put 16 bytes of a row of 128."""
    return arith.muli(arith.xori(within, chunk), const_i32(16))


def _value(codes: Any, slot: Any, output: Any, place: Any, code: Code, minus: Any) -> Any:
    """Return a pair of neighbouring columns in bfloat16, in a register."""
    i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
    indices = [as_index(index) for index in (slot, output, place)]
    if codes_per_byte(code) == 2:
        byte = arith.extui(i32, vector.extract(vector.load(ir.VectorType.get((1,), i8), codes, indices), [], [0]))
        if code == "e2m1":
            return llvm.inline_asm(i32, [byte], _E2M1, "=r,r")
        if code in MULTIPLIERS:
            return pair_of_table(byte, code)
        if code == "uint4" and minus is None:
            minus = const_i32(0x43004300)  # 128, without zero points
        return pair_of_nibbles(arith.muli(byte, const_i32(0x1001)), 0, code, minus)
    two = utils.bitcast(vector.load(ir.VectorType.get((2,), i8), codes, indices), ir.IntegerType.get_signless(16))
    two = arith.extui(i32, two)
    if code == "fp8":  # in the odd bytes
        return pair_of_bytes(rearranged(two, const_i32(0), "0x1404"), 1, code)
    return pair_of_bytes(rearranged(two, const_i32(0), "0x4140"), 0, code)


def _pair(vectors: Any, half: int, group: int, dtype: Any, num_columns: int, groups: int, *, added: float = 0.0) -> Any:
    """Return a scale, plus `added`, twice in bfloat16."""
    f32, is_packed = ir.F32Type.get(), _is_packed(dtype, num_columns, groups)
    bits = vector.extract(vectors.registers[at(0, half)], [], [group // 2 if is_packed else group])
    bits = utils.bitcast(bits, ir.IntegerType.get_signless(32))
    upper = is_packed and group % 2 == 1
    if jnp.dtype(dtype).itemsize == 1:  # the exponent of a power of two
        own = arith.andi(bits, const_i32(0xFF00 if upper else 0xFF))
        value = utils.bitcast(arith.shli(own, const_i32(15 if upper else 23)), f32)
    elif dtype == jnp.bfloat16:
        own = arith.andi(bits, const_i32(-65536)) if upper else arith.shli(bits, const_i32(16))
        value = utils.bitcast(own, f32)
    elif dtype == jnp.float16:
        i16 = ir.IntegerType.get_signless(16)
        own = arith.trunci(i16, arith.shrui(bits, const_i32(16)) if upper else bits)
        value = arith.extf(f32, utils.bitcast(own, ir.F16Type.get()))
    else:
        value = utils.bitcast(bits, f32)
    if added:
        value = arith.addf(value, mgpu.c(added, f32))
    pair = vector.broadcast(ir.VectorType.get((2,), f32), value)
    return arith.truncf(ir.VectorType.get((2,), ir.BF16Type.get()), pair)


def multiply(sums: Any, values: Any, x: Any, slot: Any) -> Any:
    """Return sums [64, M] plus the product of values [64, PIECE] and rows x[slot], [M, PIECE], in shared memory.

    The products are a group of wgmmas that is in flight: the result may only be given to this function until `wait`.
    """
    out = plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=_LAYOUT)

    def run(_, sums, values, x, slot):
        sums = mgpu.WGMMAAccumulator.from_registers(sums, sync=False)
        rows = utils.memref_slice(x, as_index(value_of(slot)))
        sums = mgpu.wgmma(sums, values, utils.memref_transpose(rows, (1, 0, 3, 2)), swizzle=128)
        nvvm.wgmma_commit_group_sync_aligned()
        return sums.value

    return inline(run, _LAYOUT, _LAYOUT, _ROWS, SCALAR, out=out)(sums, values, x, splat(slot))


def wait(num_in_flight: int) -> None:
    """Wait until so many groups of wgmmas are in flight, the last ones."""
    plgpu.wgmma_wait(num_in_flight)


def stage(ref: Any, y: Any, warpgroup: Any, row: int, *, is_gated: bool) -> None:
    """Store y [64, 8], transposed, into shared memory, ref[warpgroup, row : row + 8]; of gate and up 32 outputs."""

    def run(_, ref, y, warpgroup) -> None:
        own = thread()
        lane = arith.remui(own, const_i32(32))
        warp = arith.divui(own, const_i32(32))
        matrix = arith.remui(arith.divui(lane, const_i32(8)), const_i32(2))
        if is_gated:
            column = arith.muli(warp, const_i32(8))
        else:
            column = arith.addi(arith.muli(warp, const_i32(16)), arith.muli(matrix, const_i32(8)))
        place = arith.addi(const_i32(row), arith.remui(lane, const_i32(8)))
        indices = [as_index(index) for index in (value_of(warpgroup), place, column)]
        start = utils.memref_ptr(utils.memref_slice(ref, tuple(indices)))
        i32 = ir.IntegerType.get_signless(32)
        nvvm.stmatrix(
            start,
            [utils.bitcast(y.registers[at(0, half)], i32) for half in range(1 if is_gated else 2)],
            nvvm.MMALayout.col,
            ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"),
            nvvm.LdStMatrixEltType.B16,
        )

    inline(run, REF, _LAYOUT, SCALAR)(ref, y.astype(ref.dtype), splat(warpgroup))


def copy_staged(
    ref: Any, staged: Any, warpgroup: Any, row: Any, num_rows: Any, first: Any, *, rows: int, width: int
) -> None:
    """Copy staged[warpgroup, :rows, :width] to ref[row : row + num_rows, outputs from `first` on], as far as it goes.

    All threads of the warpgroup have stored what is staged before, and may store the next afterwards.
    """

    def run(_, ref, staged, warpgroup, row, num_rows, first) -> None:
        utils.warpgroup_barrier()
        columns = width // 8
        own, eight = thread(), ir.VectorType.get((8,), ir.BF16Type.get())
        column = arith.muli(arith.remui(own, const_i32(columns)), const_i32(8))
        output = arith.addi(value_of(first), column)
        has_output = arith.cmpi(arith.CmpIPredicate.slt, output, const_i32(ref.type.shape[1]))
        for start in range(0, rows, 128 // columns):
            own_row = arith.addi(arith.divui(own, const_i32(columns)), const_i32(start))
            limit = arith.minsi(value_of(num_rows), const_i32(rows))
            is_there = arith.andi(has_output, arith.cmpi(arith.CmpIPredicate.slt, own_row, limit))
            with utils.when(is_there):
                place = [as_index(index) for index in (value_of(warpgroup), own_row, column)]
                source = utils.memref_ptr(utils.memref_slice(staged, tuple(place)))
                target = [as_index(arith.addi(value_of(row), own_row)), as_index(output)]
                values = llvm.load(eight, source, alignment=16)
                llvm.store(values, utils.memref_ptr(utils.memref_slice(ref, tuple(target))), alignment=16)
        utils.warpgroup_barrier()

    scalars = map(splat, (warpgroup, row, num_rows, first))
    inline(run, REF, REF, *[SCALAR] * 4)(ref, staged, *scalars)
