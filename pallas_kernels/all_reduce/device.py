"""What the kernel does with the memory of other devices, which Pallas only offers behind a meeting of all on the host.

Each acts as one warpgroup. `place` and `counter` are refs in the device's own memory; `offsets` [N peers, 2 words] are
bytes from there to where each peer has the same.
"""

from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.add_rms_norm.sm90 import THREADS

_REF = plgpu.RefType()
_SCALAR = plgpu.Layout.WG_SPLAT((THREADS,))


def send(place, offsets, row, *, layout: Any) -> None:
    """Put a row into the same place of each peer's memory."""
    _inline(_send, _REF, _REF, layout)(place, offsets, row)


def tell(counter, offsets, value) -> None:
    """Set the same counter of each peer, after what this warpgroup has sent there."""
    _inline(_tell, _REF, _REF, _SCALAR)(counter, offsets, _splat(value))


def wait(counter, value) -> None:
    """Until a counter is not behind `value`, modulo 2^32: then what was sent before is seen."""
    _inline(_wait, _REF, _SCALAR)(counter, _splat(value))


def store(counter, value) -> None:
    """Set a counter of this device, for the next kernel."""
    _inline(_store, _REF, _SCALAR)(counter, _splat(value))


def _send(_, place, offsets, row) -> None:
    """As many bytes a store as a register has: LLVM takes vectors apart if it is not told an address's alignment."""
    pointer, size = llvm.PointerType.get(1), row.layout.vec_size * mgpu.bitwidth(row.mlir_dtype) // 8
    thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(THREADS, ir.IntegerType.get_signless(32)))
    own = arith.muli(arith.extui(_i64(), thread), mgpu.c(size, _i64()))
    for peer in range(offsets.type.shape[0]):
        first = arith.addi(_on_peer(place, offsets, peer), own)
        for index, values in enumerate(row.registers.flat):
            address = arith.addi(first, mgpu.c(index * THREADS * size, _i64()))
            llvm.store(values, llvm.inttoptr(pointer, address), alignment=size)


def _tell(_, counter, offsets, value) -> None:
    [value] = value.registers.flat
    mgpu.utils.warpgroup_barrier()
    with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
        _ptx("fence.acq_rel.sys;")
        for peer in range(offsets.type.shape[0]):
            _ptx("st.relaxed.sys.global.u32 [$0], $1;", _on_peer(counter, offsets, peer), value)


def _wait(_, counter, value) -> None:
    [value] = value.registers.flat
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
            value,
        )
    mgpu.utils.warpgroup_barrier()


def _store(_, counter, value) -> None:
    [value] = value.registers.flat
    with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
        _ptx("st.global.u32 [$0], $1;", _address(counter), value)


def _on_peer(ref, offsets, peer: int):
    """The address at which a peer has what lies in `ref` here."""
    offset = mgpu.utils.inline_ptx(f"ld.global.u64 $0, [$1 + {8 * peer}];", _address(offsets), result_types=_i64())
    return arith.addi(_address(ref), offset)


def _address(ref):
    return llvm.ptrtoint(_i64(), mgpu.utils.memref_ptr(ref))


def _i64():
    return ir.IntegerType.get_signless(64)


def _ptx(code: str, *operands: Any) -> None:
    mgpu.utils.inline_ptx(code, *operands, has_side_effects=True)


def _inline(run: Callable[..., Any], *arg_types: Any) -> Callable[..., Any]:
    return cast(Any, plgpu.inline_mgpu)(arg_types=arg_types)(run)


def _splat(value):
    return jnp.full((THREADS,), value)
