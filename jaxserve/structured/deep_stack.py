"""A stack that no grammar overflows: llguidance compiles by recursion, and a stack that ends takes the process along.

A chain of 1,000 references between schemas needs more than the 8 MiB that threads have; the longest chain that
MAX_GRAMMAR_BYTES holds stays below the size here. Memory is taken only as far as the stack is used.
"""

import threading
from collections.abc import Callable

STACK_BYTES = 512 * 2**20

_stack_size_lock = threading.Lock()  # the size for new threads is a setting of the process


def with_deep_stack[T](work: Callable[[], T]) -> T:
    """The result of `work`, from a thread of its own with STACK_BYTES. Raises what `work` raises."""
    return with_stack(work, STACK_BYTES)


def with_stack[T](work: Callable[[], T], num_bytes: int) -> T:
    """The result of `work`, from a thread whose stack has so many bytes. Raises what `work` raises."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="jaxserve-stack", daemon=True)
    with _stack_size_lock:
        usual = threading.stack_size(num_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
