"""Threads with a stack that no grammar overflows: llguidance compiles recursively, and an overflow kills the process.

A chain of 1,000 references between schemas needs more than the usual 8 MiB; the longest chain that fits into
MAX_GRAMMAR_BYTES needs less than STACK_BYTES. Memory is committed only as far as the stack is used.
"""

import concurrent.futures
import threading
from collections.abc import Callable

STACK_BYTES = 512 * 2**20

_stack_size_lock = threading.Lock()  # the stack size of new threads is a setting of the whole process


def with_deep_stack[T](work: Callable[[], T]) -> T:
    """Return the result of `work`, run in a thread of its own with STACK_BYTES. Raises what `work` raises."""
    return with_stack(work, STACK_BYTES)


def with_stack[T](work: Callable[[], T], num_bytes: int) -> T:
    """Return the result of `work`, run in a thread with a stack of `num_bytes`. Raises what `work` raises."""
    result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="jaxserve-stack", daemon=True)
    with _stack_size_lock:
        usual = threading.stack_size(num_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return result.result()
