"""Device operations on a transposed product, [outputs, rows] in registers, that Pallas lacks.

Outputs are the rows of WGMMA layout, 64 per warpgroup, and the multiplied rows are its columns, eight at a time. Each
function is executed by one warpgroup. If `half` is given, only the outputs of that half of each 16 are used (gate or
up).
"""

from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.product_of_codes import OUTPUTS
from pallas_kernels.device.registers import row_and_quarter
from pallas_kernels.jax_internals import arith, ir, llvm, mlir_math, vector

COLUMNS = 8
"""Rows of the product that are finished at a time."""

EMPTY = 0xFFFFFFFF
"""Word of a part that is not there yet: a NaN that no arithmetic of the GPU gives, whose NaN is 0x7FFFFFFF."""
_STORE = "st.relaxed.gpu.global.v4.b32 [{}], {{{}, {}, {}, {}}};"
_LOAD = "ld.relaxed.gpu.global.v4.b32 {{{}, {}, {}, {}}}, [{}];"

_LAYOUT = plgpu.Layout.WGMMA
_REF = plgpu.RefType()
_SCALAR = plgpu.Layout.WG_SPLAT((128,))
_CHUNK = plgpu.ShapeDtypeStruct((OUTPUTS, COLUMNS), jnp.float32, layout=_LAYOUT)


def store_part(ref: Any, sums: Any, part: Any) -> None:
    """Store sums [64, M] as parts[part], [M / 8, 128, 4] words, as the threads have them; `load_sum` waits for them."""

    def run(_, ref, sums, part) -> None:
        i32 = ir.IntegerType.get_signless(32)
        for chunk in range(sums.shape[1] // COLUMNS):
            values = [vector.extract(sums.registers[_at(chunk, half)], [], [i]) for half in range(2) for i in range(2)]
            words = [utils.bitcast(value, i32) for value in values]
            address = _address(ref, _only(part), _i32(chunk))
            utils.inline_ptx(_STORE.format("$0", "$1", "$2", "$3", "$4"), address, *words, has_side_effects=True)

    _inline(run, _REF, _LAYOUT, _SCALAR)(ref, sums, _splat(part))


def load_sum(ref: Any, first: Any, second: Any, number: Any, chunk: Any, *, stride: int, most: int) -> Any:
    """Return [64, 8], the sum of parts[first] and parts[second + i * stride], of `number` in all, in their order.

    `most` is a bound of the number. A thread waits until each word is there that its counterparts store, and then makes
    it EMPTY again. All parts are loaded before the first is added: the loads wait for memory together.
    """

    def run(_, ref, first, second, number, chunk):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        last = arith.subi(_only(number), _i32(1))
        addresses = []
        for i in range(most):
            index = arith.minsi(_i32(i), last)
            is_first = arith.cmpi(arith.CmpIPredicate.eq, index, _i32(0))
            following = arith.addi(_only(second), arith.muli(arith.subi(index, _i32(1)), _i32(stride)))
            addresses.append(_address(ref, arith.select(is_first, _only(first), following), _only(chunk)))
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
            utils.inline_ptx(_STORE.format("$0", *["$1"] * 4), address, _i32(-1), has_side_effects=True)
        four = ir.VectorType.get((4,), f32)
        parts = [_vector([utils.bitcast(word, f32) for word in words[4 * i : 4 * i + 4]]) for i in range(most)]
        total = parts[0]
        for i, part in enumerate(parts[1:], 1):
            is_there = arith.cmpi(arith.CmpIPredicate.slt, _i32(i), _only(number))
            total = arith.select(is_there, arith.addf(total, part), total)
        assert total.type == four
        values = _elements(total, 4)
        return _chunk([_vector(values[:2]), _vector(values[2:])])

    arguments = (_splat(first), _splat(second), _splat(number), _splat(chunk))
    return _inline(run, _REF, *[_SCALAR] * 4, out=_CHUNK)(ref, *arguments)


def _address(ref: Any, part: Any, chunk: Any) -> Any:
    """Return where a thread's four words of a part's chunk are in global memory."""
    i64 = ir.IntegerType.get_signless(64)
    _, num_chunks, threads, words = ref.type.shape
    index = arith.addi(arith.muli(arith.addi(arith.muli(part, _i32(num_chunks)), chunk), _i32(threads)), _thread())
    offset = arith.muli(arith.extui(i64, index), mgpu.c(4 * words, i64))
    return arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(ref)), offset)


def outputs_vector(ref: Any, piece: Any, column: Any = 0, *, up: int | None = None) -> Any:
    """Return [64, 8] whose every column is ref[outputs of a piece, column].

    The outputs are 64 in a row, or 32 of gate and the same of up in turns of eight, if `up` is where up begins.
    """
    out = plgpu.ShapeDtypeStruct((OUTPUTS, COLUMNS), ref.dtype, layout=_LAYOUT)

    def run(_, ref, piece, column):
        element = ref.type.element_type
        pair, one = (ir.VectorType.get((size,), element) for size in (2, 1))
        row, _ = row_and_quarter()
        registers = []
        for half in range(2):
            if up is None:
                index = arith.addi(arith.addi(arith.muli(_only(piece), _i32(OUTPUTS)), row), _i32(8 * half))
            else:
                warp, lane_row = arith.divui(row, _i32(16)), arith.remui(row, _i32(16))
                first = arith.addi(arith.muli(_only(piece), _i32(OUTPUTS // 2)), arith.muli(warp, _i32(8)))
                index = arith.addi(arith.addi(first, lane_row), _i32(up * half))
            [value] = _elements(vector.load(one, ref, [_index(index), _index(_only(column))]), 1)
            registers.append(vector.broadcast(pair, value))
        return _chunk(registers)

    return _inline(run, _REF, _SCALAR, _SCALAR, out=out)(ref, _splat(piece), _splat(column))


def load_transposed(ref: Any, first: Any, chunk: Any) -> Any:
    """Return ref[rows, outputs] as [64, 8] float32; rows beyond its last one repeat that."""
    out = plgpu.ShapeDtypeStruct((OUTPUTS, COLUMNS), ref.dtype, layout=_LAYOUT)

    def run(_, ref, first, chunk):
        one = ir.VectorType.get((1,), ref.type.element_type)
        registers = []
        for half in range(2):
            values = []
            for row, is_there, output in _places(ref, first, chunk, half):
                row = arith.select(is_there, row, _i32(ref.type.shape[0] - 1))
                values += _elements(vector.load(one, ref, [_index(row), _index(output)]), 1)
            registers.append(_vector(values))
        return _chunk(registers)

    return _inline(run, _REF, _SCALAR, _SCALAR, out=out)(ref, _splat(first), _splat(chunk)).astype(jnp.float32)


def store_transposed(ref: Any, x: Any, first: Any, chunk: Any, *, half: int | None = None) -> None:
    """Store x [64, 8] into ref[rows, outputs], but for rows that it has not; with `half` 32 outputs, of one half."""

    def run(_, ref, x, first, chunk) -> None:
        for own in range(2) if half is None else (half,):
            values = _elements(x.registers[_at(0, own)], 2)
            for value, (row, is_there, output) in zip(values, _places(ref, first, chunk, own, half), strict=True):
                with utils.when(is_there):
                    vector.store(_vector([value]), ref, [_index(row), _index(output)])

    _inline(run, _REF, _LAYOUT, _SCALAR, _SCALAR)(ref, x.astype(ref.dtype), _splat(first), _splat(chunk))


def halves(x: Any) -> tuple[Any, Any]:
    """Return [64, 8] of x's first halves, each twice, and of its second halves."""

    def run(_, x):
        return tuple(_chunk([x.registers[_at(0, half)]] * 2) for half in range(2))

    return _inline(run, _LAYOUT, out=(_CHUNK, _CHUNK))(x)


def store_squares(ref: Any, x: Any, part: Any, chunk: Any, scratch: Any) -> None:
    """Store the sum of the squares of each column of x [64, 8] into ref[part, 8 * chunk :], but for rows it has not."""

    def run(_, ref, x, part, chunk, scratch) -> None:
        f32 = ir.F32Type.get()
        squares = vector.broadcast(ir.VectorType.get((2,), f32), mgpu.c(0.0, f32))
        for register in x.registers.flat:
            squares = arith.addf(squares, arith.mulf(register, register))
        total = _sum_over_warpgroup(squares, scratch)
        row, quarter = row_and_quarter()
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, row, _i32(0))):
            column = arith.addi(arith.muli(_only(chunk), _i32(COLUMNS)), arith.muli(quarter, _i32(2)))
            vector.store(total, ref, [_index(_only(part)), _index(column)])

    _inline(run, _REF, _LAYOUT, _SCALAR, _SCALAR, _REF)(ref, x, _splat(part), _splat(chunk), scratch)


def store_reciprocal_roots(ref: Any, squares: Any, chunk: Any, scratch: Any, *, size: int, eps: float) -> None:
    """Store in ref[8 * chunk :] the factors of 8 rows whose partial sums of squares are squares[parts, 8 * chunk :].

    `ref` is in shared memory. `size` is the number of values of a row, `eps` is added to their mean square.
    """

    def run(_, ref, squares, chunk, scratch) -> None:
        f32, pair = ir.F32Type.get(), ir.VectorType.get((2,), ir.F32Type.get())
        row, quarter = row_and_quarter()
        # A warp has 8 of a part's threads, which are rows in WGMMA layout: 32 of them for each pair of columns.
        own = arith.addi(arith.muli(arith.divui(row, _i32(16)), _i32(8)), arith.remui(row, _i32(16)))
        column = _index(arith.addi(arith.muli(_only(chunk), _i32(COLUMNS)), arith.muli(quarter, _i32(2))))
        total = zeros = vector.broadcast(pair, mgpu.c(0.0, f32))
        num_parts = squares.type.shape[0]
        for start in range(0, num_parts, 32):
            part = arith.addi(own, _i32(start))
            is_there = arith.cmpi(arith.CmpIPredicate.ult, part, _i32(num_parts))
            part = arith.select(is_there, part, _i32(0))
            values = vector.load(pair, squares, [_index(part), column])
            total = arith.addf(total, arith.select(is_there, values, zeros))
        total = _sum_over_warpgroup(total, scratch)
        mean = arith.mulf(total, vector.broadcast(pair, mgpu.c(1 / size, f32)))
        mean = arith.addf(mean, vector.broadcast(pair, mgpu.c(eps, f32)))
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, row, _i32(0))):
            vector.store(mlir_math.rsqrt(mean), ref, [column])
        mgpu.warpgroup_barrier()

    _inline(run, _REF, _REF, _SCALAR, _REF)(ref, squares, _splat(chunk), scratch)


def rows_vector(ref: Any, chunk: Any) -> Any:
    """Return [64, 8] in which every row is ref[8 * chunk : 8 * chunk + 8], float32 in shared memory."""

    def run(_, ref, chunk):
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        _, quarter = row_and_quarter()
        column = arith.addi(arith.muli(_only(chunk), _i32(COLUMNS)), arith.muli(quarter, _i32(2)))
        return _chunk([vector.load(pair, ref, [_index(column)])] * 2)

    return _inline(run, _REF, _SCALAR, out=_CHUNK)(ref, _splat(chunk))


def _sum_over_warpgroup(values: Any, scratch: Any) -> Any:
    """Add up pairs over the threads of a warpgroup that have the same quarter; scratch is [4, 8] of float32."""
    elements = _elements(values, 2)
    for distance in (4, 8, 16):
        elements = [arith.addf(value, utils.shfl_bfly(value, distance)) for value in elements]
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    row, quarter = row_and_quarter()
    warp, lane_row = arith.divui(row, _i32(16)), arith.remui(row, _i32(16))
    column = _index(arith.muli(quarter, _i32(2)))
    mgpu.warpgroup_barrier()  # all threads have read the previous contents
    with utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane_row, _i32(0))):
        vector.store(_vector(elements), scratch, [_index(warp), column])
    mgpu.warpgroup_barrier()
    total = vector.load(pair, scratch, [_constant(0), column])
    for other in range(1, 4):
        total = arith.addf(total, vector.load(pair, scratch, [_constant(other), column]))
    return total


def _places(ref: Any, first: Any, chunk: Any, half: int, only: int | None = None) -> list[tuple[Any, Any, Any]]:
    """Return, for a thread's two values of a half, the row, whether the ref has it, and the output."""
    row, quarter = row_and_quarter()
    if only is None:
        output = arith.addi(arith.addi(_only(first), row), _i32(8 * half))
    else:
        warp, lane_row = arith.divui(row, _i32(16)), arith.remui(row, _i32(16))
        output = arith.addi(_only(first), arith.addi(arith.muli(warp, _i32(8)), lane_row))
    own = arith.addi(arith.muli(_only(chunk), _i32(COLUMNS)), arith.muli(quarter, _i32(2)))
    places = []
    for i in range(2):
        x_row = arith.addi(own, _i32(i))
        is_there = arith.cmpi(arith.CmpIPredicate.ult, x_row, _i32(ref.type.shape[0]))
        places.append((x_row, is_there, output))
    return places


def _inline(run: Callable[..., Any], *arg_types: Any, out: Any = None) -> Callable[..., Any]:
    return cast(Any, plgpu.inline_mgpu)(arg_types=arg_types, return_type=out)(run)


def _splat(value: Any) -> Any:
    return jnp.full((128,), value, jnp.int32)


def _only(scalar: Any) -> Any:
    [value] = scalar.registers.flat
    return value


def _chunk(registers: list[Any]) -> Any:
    values = np.empty((1, 1, 1, 1, 2, 1, 1, 1, 1), dtype=object)
    for half, register in enumerate(registers):
        values[_at(0, half)] = register
    return mgpu.FragmentedArray(_registers=values, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _at(chunk: int, half: int) -> tuple[int, ...]:
    return 0, chunk, 0, 0, half, 0, 0, 0, 0


def _elements(values: Any, number: int) -> list[Any]:
    return [vector.extract(values, [], [i]) for i in range(number)]


def _vector(values: list[Any]) -> Any:
    return vector.from_elements(ir.VectorType.get((len(values),), values[0].type), values)


def _thread() -> Any:
    return arith.remui(mgpu.utils.thread_idx(), _i32(128))


def _i32(value: int) -> Any:
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _constant(value: int) -> Any:
    return arith.constant(ir.IndexType.get(), value)


def _index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)
