"""Device operations on a transposed product, [outputs, rows] in registers, that Pallas lacks.

Outputs are the rows of WGMMA layout, 64 per warpgroup, and the multiplied rows are its columns, eight at a time. Each
function is executed by one warpgroup. If `half` is given, only the outputs of that half of each 16 are used (gate or
up).
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import scaling
from pallas_kernels.device.mlir import (
    REF,
    SCALAR,
    as_index,
    const_i32,
    const_index,
    elements_of,
    inline,
    splat,
    thread,
    value_of,
    vector_of,
)
from pallas_kernels.device.product_of_codes import OUTPUTS
from pallas_kernels.device.registers import at, chunk_of, row_and_quarter
from pallas_kernels.jax_internals import arith, ir, llvm, mlir_math, vector

COLUMNS = 8
"""Rows of the product that are finished at a time."""

EMPTY = 0xFFFFFFFF
"""Word of a part that is not there yet: a NaN that no arithmetic of the GPU gives, whose NaN is 0x7FFFFFFF."""
_STORE = "st.relaxed.gpu.global.v4.b32 [{}], {{{}, {}, {}, {}}};"
_LOAD = "ld.relaxed.gpu.global.v4.b32 {{{}, {}, {}, {}}}, [{}];"

_LAYOUT = plgpu.Layout.WGMMA
_CHUNK = plgpu.ShapeDtypeStruct((OUTPUTS, COLUMNS), jnp.float32, layout=_LAYOUT)


def store_part(ref: Any, sums: Any, part: Any) -> None:
    """Store sums [64, M] as parts[part], [M / 8, 128, 4] words, as the threads have them; `load_sum` waits for them."""

    def run(_, ref, sums, part) -> None:
        i32 = ir.IntegerType.get_signless(32)
        for chunk in range(sums.shape[1] // COLUMNS):
            values = [vector.extract(sums.registers[at(chunk, half)], [], [i]) for half in range(2) for i in range(2)]
            words = [utils.bitcast(value, i32) for value in values]
            address = _address(ref, value_of(part), const_i32(chunk))
            utils.inline_ptx(_STORE.format("$0", "$1", "$2", "$3", "$4"), address, *words, has_side_effects=True)

    inline(run, REF, _LAYOUT, SCALAR)(ref, sums, splat(part))


def load_sum(ref: Any, first: Any, second: Any, number: Any, chunk: Any, *, stride: int, most: int) -> Any:
    """Return [64, 8], the sum of parts[first] and parts[second + i * stride], of `number` in all, in their order.

    `most` is a bound of the number. A thread waits until each word is there that its counterparts store, and then makes
    it EMPTY again. All parts are loaded before the first is added: the loads wait for memory together.
    """

    def run(_, ref, first, second, number, chunk):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        last = arith.subi(value_of(number), const_i32(1))
        addresses = []
        for i in range(most):
            index = arith.minsi(const_i32(i), last)
            is_first = arith.cmpi(arith.CmpIPredicate.eq, index, const_i32(0))
            following = arith.addi(value_of(second), arith.muli(arith.subi(index, const_i32(1)), const_i32(stride)))
            addresses.append(_address(ref, arith.select(is_first, value_of(first), following), value_of(chunk)))
        num_words = 4 * most
        loads = [_LOAD.format(*(f"${4 * i + j}" for j in range(4)), f"${num_words + i}") for i in range(most)]
        largest = " ".join(f"max.u32 m, m, ${i};" for i in range(num_words))
        text = f"{{ .reg .pred p; .reg .b32 m; again: {' '.join(loads)} mov.b32 m, 0; {largest} "
        text += f"setp.eq.u32 p, m, {EMPTY}; @p bra again; }}"
        constraints = ",".join(["=&r"] * num_words + ["l"] * most)
        struct = llvm.StructType.get_literal([i32] * num_words)
        found = llvm.inline_asm(struct, addresses, text, constraints, has_side_effects=True)
        words = [llvm.extractvalue(i32, found, [i]) for i in range(num_words)]
        for address in addresses:
            utils.inline_ptx(_STORE.format("$0", *["$1"] * 4), address, const_i32(-1), has_side_effects=True)
        four = ir.VectorType.get((4,), f32)
        parts = [vector_of([utils.bitcast(word, f32) for word in words[4 * i : 4 * i + 4]]) for i in range(most)]
        total = parts[0]
        for i, part in enumerate(parts[1:], 1):
            is_there = arith.cmpi(arith.CmpIPredicate.slt, const_i32(i), value_of(number))
            total = arith.select(is_there, arith.addf(total, part), total)
        assert total.type == four
        values = elements_of(total, 4)
        return chunk_of([vector_of(values[:2]), vector_of(values[2:])])

    arguments = (splat(first), splat(second), splat(number), splat(chunk))
    return inline(run, REF, *[SCALAR] * 4, out=_CHUNK)(ref, *arguments)


def _address(ref: Any, part: Any, chunk: Any) -> Any:
    """Return where a thread's four words of a part's chunk are in global memory."""
    i64 = ir.IntegerType.get_signless(64)
    _, num_chunks, threads, words = ref.type.shape
    index = arith.addi(
        arith.muli(arith.addi(arith.muli(part, const_i32(num_chunks)), chunk), const_i32(threads)), thread()
    )
    offset = arith.muli(arith.extui(i64, index), mgpu.c(4 * words, i64))
    return arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(ref)), offset)


def outputs_vector(ref: Any, piece: Any, *, up: int | None = None, dtype: str | None = None) -> Any:
    """Return [64, 8] whose every column is ref[outputs of a piece, 0], in float32; `dtype` is the type if not ref's.

    The outputs are 64 in a row, or 32 of gate and the same of up in turns of eight, if `up` is where up begins.
    """
    words = load_words(ref, piece, 0, count=1, up=up)
    [vector] = scaling.vectors_of(words, range(1), dtype or jnp.dtype(ref.dtype).name)
    return vector


def load_words(ref: Any, piece: Any, column: Any, *, count: int, up: int | None = None) -> tuple[Any, ...]:
    """Return ref[outputs of a piece, column : column + count], see `scaling.load_words`."""
    return scaling.load_words(ref, (piece,), column, count=count, output=functools.partial(_output, up=up))


def _output(half: int, piece: Any, *, up: int | None) -> Any:
    """Return the index of a thread's output of a piece in a half of its registers."""
    row, _ = row_and_quarter()
    if up is None:
        return arith.addi(arith.addi(arith.muli(piece, const_i32(OUTPUTS)), row), const_i32(8 * half))
    warp, lane_row = arith.divui(row, const_i32(16)), arith.remui(row, const_i32(16))
    first = arith.addi(arith.muli(piece, const_i32(OUTPUTS // 2)), arith.muli(warp, const_i32(8)))
    return arith.addi(arith.addi(first, lane_row), const_i32(up * half))


def load_transposed(ref: Any, first: Any, chunk: Any) -> Any:
    """Return ref[rows, outputs] as [64, 8] float32; rows beyond its last one repeat that."""
    out = plgpu.ShapeDtypeStruct((OUTPUTS, COLUMNS), ref.dtype, layout=_LAYOUT)

    def run(_, ref, first, chunk):
        one = ir.VectorType.get((1,), ref.type.element_type)
        registers = []
        for half in range(2):
            values = []
            for row, is_there, output in _places(ref, first, chunk, half):
                row = arith.select(is_there, row, const_i32(ref.type.shape[0] - 1))
                values += elements_of(vector.load(one, ref, [as_index(row), as_index(output)]), 1)
            registers.append(vector_of(values))
        return chunk_of(registers)

    return inline(run, REF, SCALAR, SCALAR, out=out)(ref, splat(first), splat(chunk)).astype(jnp.float32)


def store_transposed(ref: Any, x: Any, first: Any, chunk: Any, *, half: int | None = None) -> None:
    """Store x [64, 8] into ref[rows, outputs], but for rows that it has not; with `half` 32 outputs, of one half."""

    def run(_, ref, x, first, chunk) -> None:
        for own in range(2) if half is None else (half,):
            values = elements_of(x.registers[at(0, own)], 2)
            for value, (row, is_there, output) in zip(values, _places(ref, first, chunk, own, half), strict=True):
                with utils.when(is_there):
                    vector.store(vector_of([value]), ref, [as_index(row), as_index(output)])

    inline(run, REF, _LAYOUT, SCALAR, SCALAR)(ref, x.astype(ref.dtype), splat(first), splat(chunk))


def store_squares(ref: Any, x: Any, part: Any, chunk: Any, scratch: Any) -> None:
    """Store the sum of the squares of each column of x [64, 8] into ref[part, 8 * chunk :], but for rows it has not."""

    def run(_, ref, x, part, chunk, scratch) -> None:
        f32 = ir.F32Type.get()
        squares = vector.broadcast(ir.VectorType.get((2,), f32), mgpu.c(0.0, f32))
        for register in x.registers.flat:
            squares = arith.addf(squares, arith.mulf(register, register))
        total = _sum_over_warpgroup(squares, scratch)
        row, quarter = row_and_quarter()
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, row, const_i32(0))):
            column = arith.addi(arith.muli(value_of(chunk), const_i32(COLUMNS)), arith.muli(quarter, const_i32(2)))
            vector.store(total, ref, [as_index(value_of(part)), as_index(column)])

    inline(run, REF, _LAYOUT, SCALAR, SCALAR, REF)(ref, x, splat(part), splat(chunk), scratch)


def store_reciprocal_roots(ref: Any, squares: Any, chunk: Any, scratch: Any, *, size: int, eps: float) -> None:
    """Store in ref[8 * chunk :] the factors of 8 rows whose partial sums of squares are squares[parts, 8 * chunk :].

    `ref` is in shared memory. `size` is the number of values of a row, `eps` is added to their mean square.
    """

    def run(_, ref, squares, chunk, scratch) -> None:
        f32, pair = ir.F32Type.get(), ir.VectorType.get((2,), ir.F32Type.get())
        row, quarter = row_and_quarter()
        # A warp has 8 of a part's threads, which are rows in WGMMA layout: 32 of them for each pair of columns.
        own = arith.addi(arith.muli(arith.divui(row, const_i32(16)), const_i32(8)), arith.remui(row, const_i32(16)))
        column = as_index(
            arith.addi(arith.muli(value_of(chunk), const_i32(COLUMNS)), arith.muli(quarter, const_i32(2)))
        )
        total = zeros = vector.broadcast(pair, mgpu.c(0.0, f32))
        num_parts = squares.type.shape[0]
        for start in range(0, num_parts, 32):
            part = arith.addi(own, const_i32(start))
            is_there = arith.cmpi(arith.CmpIPredicate.ult, part, const_i32(num_parts))
            part = arith.select(is_there, part, const_i32(0))
            values = vector.load(pair, squares, [as_index(part), column])
            total = arith.addf(total, arith.select(is_there, values, zeros))
        total = _sum_over_warpgroup(total, scratch)
        mean = arith.mulf(total, vector.broadcast(pair, mgpu.c(1 / size, f32)))
        mean = arith.addf(mean, vector.broadcast(pair, mgpu.c(eps, f32)))
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, row, const_i32(0))):
            vector.store(mlir_math.rsqrt(mean), ref, [column])
        mgpu.warpgroup_barrier()

    inline(run, REF, REF, SCALAR, REF)(ref, squares, splat(chunk), scratch)


def rows_vector(ref: Any, chunk: Any) -> Any:
    """Return [64, 8] in which every row is ref[8 * chunk : 8 * chunk + 8], float32 in shared memory."""

    def run(_, ref, chunk):
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        _, quarter = row_and_quarter()
        column = arith.addi(arith.muli(value_of(chunk), const_i32(COLUMNS)), arith.muli(quarter, const_i32(2)))
        return chunk_of([vector.load(pair, ref, [as_index(column)])] * 2)

    return inline(run, REF, SCALAR, out=_CHUNK)(ref, splat(chunk))


def _sum_over_warpgroup(values: Any, scratch: Any) -> Any:
    """Add up pairs over the threads of a warpgroup that have the same quarter; scratch is [4, 8] of float32."""
    elements = elements_of(values, 2)
    for distance in (4, 8, 16):
        elements = [arith.addf(value, utils.shfl_bfly(value, distance)) for value in elements]
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    row, quarter = row_and_quarter()
    warp, lane_row = arith.divui(row, const_i32(16)), arith.remui(row, const_i32(16))
    column = as_index(arith.muli(quarter, const_i32(2)))
    mgpu.warpgroup_barrier()  # all threads have read the previous contents
    with utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane_row, const_i32(0))):
        vector.store(vector_of(elements), scratch, [as_index(warp), column])
    mgpu.warpgroup_barrier()
    total = vector.load(pair, scratch, [const_index(0), column])
    for other in range(1, 4):
        total = arith.addf(total, vector.load(pair, scratch, [const_index(other), column]))
    return total


def _places(ref: Any, first: Any, chunk: Any, half: int, only: int | None = None) -> list[tuple[Any, Any, Any]]:
    """Return, for a thread's two values of a half, the row, whether the ref has it, and the output."""
    row, quarter = row_and_quarter()
    if only is None:
        output = arith.addi(arith.addi(value_of(first), row), const_i32(8 * half))
    else:
        warp, lane_row = arith.divui(row, const_i32(16)), arith.remui(row, const_i32(16))
        output = arith.addi(value_of(first), arith.addi(arith.muli(warp, const_i32(8)), lane_row))
    own = arith.addi(arith.muli(value_of(chunk), const_i32(COLUMNS)), arith.muli(quarter, const_i32(2)))
    places = []
    for i in range(2):
        x_row = arith.addi(own, const_i32(i))
        is_there = arith.cmpi(arith.CmpIPredicate.ult, x_row, const_i32(ref.type.shape[0]))
        places.append((x_row, is_there, output))
    return places
