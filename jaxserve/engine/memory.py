"""Memory of this process that nobody uses any more."""

import ctypes

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc


def give_memory_back() -> None:
    """Give what has been freed back to the system: the C library would keep hundreds of megabytes for the thread that
    had them, which is what a tokenizer of a large text or the compiler of an engine's steps leaves behind.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)
