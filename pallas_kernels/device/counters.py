"""Counters in global memory, by which CTAs tell each other that something is there. Pallas's
semaphores would need a memset before every call.

Each function is executed by one warpgroup. The interpreter runs CTAs one after the other and supports none of them:
`interpret` leaves them out.
"""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.device.mlir import REF, SCALAR, const_i32, inline, splat, value_of


def signal(counter, *, interpret: bool) -> None:
    """Add 1 to a counter in global memory, after whatever this warpgroup has written there."""
    if not interpret:
        inline(_signal, REF)(counter)


def wait(counter, value, *, interpret: bool) -> None:
    """Wait until a counter has reached `value`; earlier writes are visible then, to TMA too."""
    if not interpret:  # the interpreter runs CTAs one after another
        inline(_wait, REF, SCALAR)(counter, splat(value))


def take(counter, value, *, interpret: bool) -> None:
    """Wait until a counter has reached `value`, and subtract it; earlier writes are visible then, not to TMA."""
    if not interpret:
        inline(_take, REF, SCALAR)(counter, splat(value))


def clear(counter, *, interpret: bool) -> None:
    """Set a counter to 0."""
    if not interpret:
        inline(_clear, REF)(counter)


def add(counter: Any, amount: Any) -> None:
    """Add an amount that the device computes, as `signal` adds 1."""
    inline(_add, REF, SCALAR)(counter, splat(amount))


def _signal(_, counter) -> None:
    mgpu.warpgroup_barrier()
    _semaphore(counter).signal(1, memory_scope="gpu")


def _wait(_, counter, value) -> None:
    _semaphore(counter).wait(value_of(value), decrement=False, memory_scope="gpu")
    mgpu.utils.inline_ptx("fence.proxy.async;", has_side_effects=True)


def _take(_, counter, value) -> None:
    _semaphore(counter).wait(value_of(value), memory_scope="gpu")


def _clear(_, counter) -> None:
    with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
        mgpu.utils.inline_ptx(
            "st.relaxed.gpu.global.u32 [$0], $1;", mgpu.utils.memref_ptr(counter), const_i32(0), has_side_effects=True
        )


def _semaphore(counter):
    return mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(counter))


def _add(_, counter, amount) -> None:
    mgpu.warpgroup_barrier()
    _semaphore(counter).signal(value_of(amount), memory_scope="gpu")
