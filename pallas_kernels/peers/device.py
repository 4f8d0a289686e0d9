"""Device operations on the memory of other devices, which Pallas only offers with a synchronization on the host.

Each is executed by one warpgroup. Refs are in the device's own memory; an `offset` [2 words] is the distance in bytes
from there to a peer's counterpart.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.device.mlir import REF, SCALAR, const_i32, inline, splat, thread, value_of
from pallas_kernels.jax_internals import arith, ir, llvm

THREADS = 128  # of a warpgroup
UNIT = 16
"""Bytes that a thread copies at a time."""

UNITS_ON_THEIR_WAY = 8
"""Units that a thread loads before it stores them."""

UNITS = 16
"""Units of a piece that a thread copies."""

PIECE = THREADS * UNITS * UNIT
"""Bytes that `copy` copies."""


def send(target, offset, row, *, layout: Any) -> None:
    """Store a row in a peer's counterpart of `target`."""
    inline(_send, REF, REF, layout)(target, offset, row)


def copy(source, target, piece) -> None:
    """Copy piece number `piece` of a row to the same piece of another row: `PIECE` bytes, or what is left.

    Rows are contiguous, of a multiple of `UNIT` bytes.
    """
    inline(_copy, REF, REF, SCALAR)(source, target, splat(piece))


def copy_to_peer(source, target, offset, piece) -> None:
    """Copy a piece as `copy` does, to a peer's counterpart of `target`."""
    inline(_copy_to_peer, REF, REF, REF, SCALAR)(source, target, offset, splat(piece))


def notify(counters: Sequence[tuple[Any, Any]], value) -> None:
    """Set (counter, offset) of each peer, after what this warpgroup has sent there."""
    refs = [ref for pair in counters for ref in pair]
    inline(_notify, *[REF] * len(refs), SCALAR)(*refs, splat(value))


def wait(counter, value) -> None:
    """Wait until a counter has reached `value`, modulo 2^32; what was sent before is visible then."""
    inline(_wait, REF, SCALAR)(counter, splat(value))


def store(counter, value) -> None:
    """Set a counter of this device, for the next kernel."""
    inline(_store, REF, SCALAR)(counter, splat(value))


def _send(_, target, offset, row) -> None:
    """Store as many bytes at a time as a register has: LLVM splits vectors unless it is told an address's alignment."""
    size = row.layout.vec_size * mgpu.bitwidth(row.mlir_dtype) // 8
    first = arith.addi(_on_peer(target, offset), arith.muli(_wide(thread()), mgpu.c(size, _i64())))
    for index, values in enumerate(row.registers.flat):
        llvm.store(values, _pointer(first, index * THREADS * size), alignment=size)


def _copy(_, source, target, piece) -> None:
    _copy_units(source, _address(target), piece)


def _copy_to_peer(_, source, target, offset, piece) -> None:
    _copy_units(source, _on_peer(target, offset), piece)


def _copy_units(source, target, piece) -> None:
    """Copy units; threads beyond the last one copy it again, with the same result."""
    shape, bits = source.type.shape, mgpu.bitwidth(source.type.element_type)
    [row_size] = shape
    num_units, i32 = row_size * bits // 8 // UNIT, ir.IntegerType.get_signless(32)
    first = arith.addi(arith.muli(value_of(piece), const_i32(THREADS * UNITS)), thread())
    base, unit = _address(source), ir.VectorType.get((UNIT // 4,), i32)
    for indices in itertools.batched(range(min(UNITS, -(-num_units // THREADS))), UNITS_ON_THEIR_WAY):
        offsets = []
        for index in indices:
            own = arith.minsi(arith.addi(first, const_i32(index * THREADS)), const_i32(num_units - 1))
            offsets.append(arith.muli(_wide(own), mgpu.c(UNIT, _i64())))
        values = [llvm.load(unit, _pointer(arith.addi(base, distance)), alignment=UNIT) for distance in offsets]
        for value, distance in zip(values, offsets, strict=True):
            llvm.store(value, _pointer(arith.addi(target, distance)), alignment=UNIT)


def _notify(_, *operands) -> None:
    *refs, value = operands
    mgpu.utils.warpgroup_barrier()
    with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
        _ptx("fence.acq_rel.sys;")
        for counter, offset in zip(refs[::2], refs[1::2], strict=True):
            _ptx("st.relaxed.sys.global.u32 [$0], $1;", _on_peer(counter, offset), value_of(value))


def _wait(_, counter, value) -> None:
    with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
        _ptx(
            """{
            .reg .pred behind;
            .reg .s32 ahead;
            again:
            ld.acquire.sys.global.u32 ahead, [$0];
            sub.s32 ahead, ahead, $1;
            setp.lt.s32 behind, ahead, 0;
            @behind bra again;
            }""",
            _address(counter),
            value_of(value),
        )
    mgpu.utils.warpgroup_barrier()


def _store(_, counter, value) -> None:
    with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
        _ptx("st.global.u32 [$0], $1;", _address(counter), value_of(value))


def _on_peer(ref, offset):
    """Return the address of a peer's counterpart of `ref`."""
    offset = mgpu.utils.inline_ptx("ld.global.u64 $0, [$1];", _address(offset), result_types=_i64())
    return arith.addi(_address(ref), offset)


def _address(ref):
    return llvm.ptrtoint(_i64(), mgpu.utils.memref_ptr(ref))


def _pointer(address, offset: int = 0):
    if offset:
        address = arith.addi(address, mgpu.c(offset, _i64()))
    return llvm.inttoptr(llvm.PointerType.get(1), address)


def _wide(index):
    return arith.extui(_i64(), index)


def _i64():
    return ir.IntegerType.get_signless(64)


def _ptx(code: str, *operands: Any) -> None:
    mgpu.utils.inline_ptx(code, *operands, has_side_effects=True)
