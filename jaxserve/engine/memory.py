"""Return unused memory of this process to the system."""

import ctypes

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc


def give_memory_back() -> None:
    """Return freed memory to the system.

    The C library would keep hundreds of megabytes for the thread that freed them, such as a tokenizer of a large text
    or the compiler of an engine's steps.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)
