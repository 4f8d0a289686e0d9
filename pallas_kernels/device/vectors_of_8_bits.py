"""Keys and values of 8 bits in shared memory, as the attention kernels multiply by them, and scales.

Each operation is executed by one warpgroup; `interpret` replaces it for the interpreter. Blocks of [rows, D] are tiled
and swizzled as `transforms` says. float16 represents every number of 8 bits exactly and takes the fewest instructions,
bfloat16 has room for values times their scales.
"""

import itertools
from typing import Any, Literal, cast

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device.codes import Code, halves_of_bytes, pair_of_bytes, rearranged, times_sum
from pallas_kernels.device.mlir import REF, SCALAR, const_i32, inline, splat, thread, value_of, vector_of
from pallas_kernels.device.registers import matrix_of, registers_for, row_and_quarter
from pallas_kernels.jax_internals import arith, ir, llvm, vector

CODES: dict[str, Code] = {"float8_e4m3fn": "fp8", "float8_e5m2": "e5m2", "int8": "int8"}
"""The codes of the dtypes of pages."""

_LAYOUT = plgpu.Layout.WGMMA


def swizzle_of(num_columns: int, *, itemsize: int) -> int:
    """Return the widest swizzle in bytes that divides a row."""
    return next(width for width in (128, 64, 32) if num_columns * itemsize % width == 0)


def transforms(num_columns: int, *, itemsize: int) -> tuple[Any, Any]:
    """Return the transforms of an array of rows in shared memory: tiles of 8 rows of up to 128 bytes."""
    width = swizzle_of(num_columns, itemsize=itemsize)
    return cast(Any, plgpu.TilingTransform)((8, width // itemsize)), cast(Any, plgpu.SwizzleTransform)(width)


def put_queries(target: Any, source: Any, *, interpret: bool) -> None:
    """Copy [rows, D] from plain rows of bfloat16 to the first of as many or more tiled ones of float16, the columns
    `permuted`.

    Numbers that float16 has no room for become infinite.
    """
    rows, size = source.shape
    if interpret:
        target.at[pl.ds(0, rows)][...] = permuted(source[...].astype(jnp.float16))
        return

    def run(_: Any, target: Any, source: Any) -> None:
        chunks = size // 16
        for step in range(-(-rows * chunks // 128)):
            number = arith.addi(thread(), const_i32(128 * step))
            with utils.when(arith.cmpi(arith.CmpIPredicate.ult, number, const_i32(rows * chunks))):
                row, chunk = arith.divui(number, const_i32(chunks)), arith.remui(number, const_i32(chunks))
                offset = arith.muli(arith.addi(arith.muli(row, const_i32(chunks)), chunk), const_i32(32))
                halves = [_load(source, arith.addi(offset, const_i32(16 * half)), 4) for half in range(2)]
                pairs = [_in_float16(vector.extract(half, [], [i])) for half in halves for i in range(4)]
                for part in range(2):
                    at = arith.addi(arith.muli(chunk, const_i32(2)), const_i32(part))
                    _store(target, _offset(size, 2, row, at), vector_of(pairs[part::2]))

    inline(run, plgpu.RefType(transforms(size, itemsize=2)), REF)(target, source)


def permuted(columns: Any) -> Any:
    """Return columns [..., D] in the order of those of `as_operand`: of each 16, the first two of each four, then the
    others.
    """
    *rest, size = columns.shape
    return columns.reshape(*rest, size // 16, 4, 2, 2).swapaxes(-3, -2).reshape(*rest, size)


def as_operand(ref: Any, first: int = 0, last: int | None = None, *, interpret: bool) -> Any:
    """Return columns [first, last), multiples of 16, of [rows, D] in float16 in registers, as wgmma takes its first
    operand, `permuted`.
    """
    rows, size = ref.shape
    end = size if last is None else last
    if interpret:
        return permuted(ref[...].astype(jnp.float16))[:, first:end]
    code = CODES[jnp.dtype(ref.dtype).name]

    def run(_: Any, ref: Any) -> Any:
        row, quarter = row_and_quarter()
        registers = registers_for(end - first, rows=rows)
        in_chunk = arith.muli(quarter, const_i32(4))
        # Offsets of all chunks of a large row would take too many registers: those of a tile, which others are behind.
        known = size // 16 if size <= 256 else swizzle_of(size, itemsize=1) // 16
        offsets = [arith.addi(_offset(size, 1, row, chunk), in_chunk) for chunk in range(known)]
        for tile, chunk, half in np.ndindex(rows // 64, (end - first) // 16, 2):
            behind, of_known = divmod(first // 16 + chunk, known)
            below = const_i32(_bytes_of_rows(size, 1, 64 * tile + 8 * half) + behind * known * 16 * 8)
            word = _load(ref, arith.addi(offsets[of_known], below), 1)
            for index, pair in enumerate(halves_of_bytes(word, code)):
                registers[tile, 2 * chunk + index, 0, 0, half, 0, 0, 0, 0] = utils.bitcast(pair, _pair())
        return matrix_of(registers)

    out = plgpu.ShapeDtypeStruct((rows, end - first), jnp.float16, layout=_LAYOUT)
    return inline(run, plgpu.RefType(transforms(size, itemsize=1)), out=out)(ref)


def convert(
    target: Any,
    source: Any,
    scales_ref: Any = None,
    kind: Literal[0, 1] = 0,
    *,
    held: tuple[Any, Any] | None = None,
    interpret: bool,
) -> None:
    """Copy [rows, D], converted to float16; `commit_smem` shows it to wgmma. No thread may still wait for a product
    of what was there. Rows outside of the range `held` become zeros.

    With `scales_ref`, [pages, 2, S], rows are converted to bfloat16 and multiplied by their scales of this kind.
    """
    rows, size = source.shape
    if interpret:
        found = source[...].astype(jnp.float32)
        if scales_ref is not None:
            found = found * scales_ref[:, kind].reshape(-1, 1)
        if held is not None:
            row = jnp.arange(rows)[:, None]
            found = jnp.where((row >= held[0]) & (row < held[1]), found, 0.0)
        target[...] = found.astype(target.dtype)
        return
    code = CODES[jnp.dtype(source.dtype).name]

    def run(_: Any, target: Any, source: Any, *others: Any) -> None:
        scales_memory = None if scales_ref is None else others[0]
        limits = None if held is None else [value_of(other) for other in others[-2:]]
        chunks = size // 16
        own = thread()

        def move(row: Any, chunk: Any, below: int = 0) -> None:
            """Convert a chunk of the row so many rows, whole tiles of 8, below this one."""
            source_offset = arith.addi(_offset(size, 1, row, chunk), const_i32(_bytes_of_rows(size, 1, below)))
            words = _load(source, source_offset, 4)
            if limits is not None:
                own_row = arith.addi(row, const_i32(below))
                is_held = arith.andi(
                    arith.cmpi(arith.CmpIPredicate.sge, own_row, limits[0]),
                    arith.cmpi(arith.CmpIPredicate.slt, own_row, limits[1]),
                )
                words = arith.select(is_held, words, vector_of([const_i32(0)] * 4))
            scale_row = arith.addi(row, const_i32(below))
            factors = None if scales_memory is None else _factors(_scale(scales_memory, kind, scale_row, 1))
            for part in range(2):
                values = []
                for i in range(2):
                    word = vector.extract(words, [], [2 * part + i])
                    if factors is None:
                        values += halves_of_bytes(word, code)
                        continue
                    even, odd = (times_sum(pair_of_bytes(word, index, code), *factors) for index in range(2))
                    values += [rearranged(even, odd, "0x5410"), rearranged(even, odd, "0x7632")]
                at = arith.addi(arith.muli(chunk, const_i32(2)), const_i32(part))
                offset = arith.addi(_offset(size, 2, row, at), const_i32(_bytes_of_rows(size, 2, below)))
                _store(target, offset, vector_of(values))

        if chunks == 8:  # whole rows of 128 bytes: no two lanes of a transaction use the same bank
            first = _without_conflicts(own)
            for below in range(0, rows, 16):
                move(*first, below)
            return
        if chunks == 32:  # four rows at a time, whose offsets are those of eight rows above
            for step, below in itertools.product(range(2), range(0, rows, 8)):
                number = arith.addi(own, const_i32(128 * step))
                move(arith.divui(number, const_i32(chunks)), arith.remui(number, const_i32(chunks)), below)
            return
        for step in range(-(-rows * chunks // 128)):
            number = arith.addi(own, const_i32(128 * step))
            place = arith.divui(number, const_i32(chunks)), arith.remui(number, const_i32(chunks))
            if (step + 1) * 128 <= rows * chunks:
                move(*place)
            else:
                with utils.when(arith.cmpi(arith.CmpIPredicate.ult, number, const_i32(rows * chunks))):
                    move(*place)

    kinds = [plgpu.RefType(transforms(size, itemsize=itemsize)) for itemsize in (2, 1)]
    others = ([] if scales_ref is None else [scales_ref]) + ([] if held is None else [splat(limit) for limit in held])
    kinds += ([] if scales_ref is None else [REF]) + ([] if held is None else [SCALAR, SCALAR])
    inline(run, *kinds)(target, source, *others)


def wait_for_all(*, interpret: bool) -> None:
    """Wait until all threads of the warpgroup have arrived here."""
    if not interpret:
        inline(lambda _: utils.warpgroup_barrier())()


def scales(ref: Any, kind: Literal[0, 1], shape: tuple[int, int], *, axis: int, interpret: bool) -> Any:
    """Return the factors of keys (kind 0) or values (1) along an axis of a float32 matrix in WGMMA layout.

    `ref` is [pages, 2, S] in shared memory, the scales of all keys of a block.
    """
    if interpret:
        of_keys = ref[:, kind].reshape(-1)
        return jnp.broadcast_to(of_keys[:, None] if axis == 0 else of_keys[None], shape)

    def run(_: Any, ref: Any) -> Any:
        row, quarter = row_and_quarter()
        registers = registers_for(shape[1], rows=shape[0])

        for tile, group in np.ndindex(registers.shape[:2]):
            for half in range(2):
                index = tile, group, 0, 0, half, 0, 0, 0, 0
                if axis == 0:
                    if group == 0:
                        key = arith.addi(row, const_i32(64 * tile + 8 * half))
                        one = vector.extract(_scale(ref, kind, key, 1), [], [0])
                        registers[index] = vector_of([one, one])
                    else:
                        registers[index] = registers[tile, 0, 0, 0, half, 0, 0, 0, 0]
                elif half == 0 and tile == 0:
                    first = arith.addi(arith.muli(quarter, const_i32(2)), const_i32(8 * group))
                    registers[index] = _scale(ref, kind, first, 2)
                else:
                    registers[index] = registers[0, group, 0, 0, 0, 0, 0, 0, 0]
        return matrix_of(registers)

    return inline(run, REF, out=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=_LAYOUT))(ref)


def _scale(ref: Any, kind: int, key: Any, number: int) -> Any:
    """Return the scales of keys in a row, of [pages, 2, S]."""
    f32 = ir.F32Type.get()
    _, _, block = ref.type.shape
    page, token = arith.divui(key, const_i32(block)), arith.remui(key, const_i32(block))
    offset = arith.addi(arith.muli(page, const_i32(2 * block)), arith.addi(token, const_i32(kind * block)))
    pointer = utils.getelementptr(utils.memref_ptr(ref), [offset], f32)
    return llvm.load(ir.VectorType.get((number,), f32), pointer, alignment=4 * number)


def _factors(scale: Any) -> tuple[Any, Any]:
    """Return a scale as the sum of two bfloat16, each twice in a register."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    scale = vector.extract(scale, [], [0])
    high = llvm.inline_asm(i32, [scale], "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f")
    rest = arith.subf(scale, utils.bitcast(arith.shli(high, const_i32(16)), f32))
    return high, llvm.inline_asm(i32, [rest], "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f")


def _in_float16(pair: Any) -> Any:
    """Return two numbers of bfloat16 in a register as float16."""
    text = "{ .reg .f32 a, b; .reg .b32 c; shl.b32 c, $1, 16; mov.b32 a, c; and.b32 c, $1, 0xffff0000; mov.b32 b, c; "
    return llvm.inline_asm(ir.IntegerType.get_signless(32), [pair], text + "cvt.rn.f16x2.f32 $0, b, a; }", "=r,r")


def _without_conflicts(number: Any) -> tuple[Any, Any]:
    """Return the row and the chunk of 16 values, of 8 in a row, of an access.

    Eight lanes have the chunks of a half of two rows whose numbers differ in bits 0 and 2: neither these bytes nor
    twice as many of the converted row have a bank in common.
    """

    def bits(value: Any, first: int, count: int) -> Any:
        return arith.andi(arith.shrui(value, const_i32(first)), const_i32((1 << count) - 1))

    column, other = bits(number, 0, 2), bits(number, 2, 1)
    pair, half = bits(number, 3, 2), bits(number, 5, 1)
    within = arith.xori(pair, arith.muli(other, const_i32(5)))
    row = arith.addi(arith.muli(arith.shrui(number, const_i32(6)), const_i32(8)), within)
    return row, arith.addi(column, arith.muli(half, const_i32(4)))


def _offset(size: int, itemsize: int, row: Any, chunk: Any) -> Any:
    """Return the offset in bytes of a chunk of 16 bytes of a row in a tiled and swizzled array of rows."""
    width = swizzle_of(size, itemsize=itemsize)
    lanes, num_tiles = width // 16, size * itemsize // width
    if isinstance(chunk, int):
        tile, column = const_i32(chunk // lanes), const_i32(chunk % lanes)
    else:
        tile, column = arith.divui(chunk, const_i32(lanes)), arith.remui(chunk, const_i32(lanes))
    within = arith.andi(row, const_i32(7))
    column = arith.xori(column, arith.divui(within, const_i32(8 // lanes)))
    tile = arith.addi(arith.muli(arith.shrui(row, const_i32(3)), const_i32(num_tiles)), tile)
    row_offset = arith.addi(arith.muli(tile, const_i32(8 * width)), arith.muli(within, const_i32(width)))
    return arith.addi(row_offset, arith.muli(column, const_i32(16)))


def _bytes_of_rows(size: int, itemsize: int, rows: int) -> int:
    """Return by how much more the offset is so many rows further down, a multiple of 8."""
    return rows * size * itemsize


def _pair() -> Any:
    return ir.VectorType.get((2,), ir.F16Type.get())


def _load(ref: Any, offset: Any, words: int) -> Any:
    i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
    pointer = utils.getelementptr(utils.memref_ptr(ref), [offset], i8)
    return llvm.load(i32 if words == 1 else ir.VectorType.get((words,), i32), pointer, alignment=4 * words)


def _store(ref: Any, offset: Any, words: Any) -> None:
    pointer = utils.getelementptr(utils.memref_ptr(ref), [offset], ir.IntegerType.get_signless(8))
    llvm.store(words, pointer, alignment=16)
