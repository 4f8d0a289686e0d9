"""Full garbage collections, which visit all that jax and the start of an engine have left: they hold a step up for a
tenth of a second or more.
"""

import contextlib
import gc
import threading
import time
from collections.abc import Iterator

LONGEST = 60.0
"""Seconds after which one who leaves runs a full collection, if others are still inside."""


class _FullCollections:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._threshold = 0
        self._since = 0.0

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """Put full collections off until no thread is inside. All but cycles that have outlived the other collections
        is freed meanwhile as ever; where threads take turns, these are freed once a minute.
        """
        with self._lock:
            if not self._num_inside:
                first, second, self._threshold = gc.get_threshold()
                gc.set_threshold(first, second, 2**31 - 1)
                self._since = time.monotonic()
            self._num_inside += 1
        try:
            yield
        finally:
            is_long = False
            with self._lock:
                self._num_inside -= 1
                if not self._num_inside:
                    first, second, _ = gc.get_threshold()
                    gc.set_threshold(first, second, self._threshold)
                elif is_long := time.monotonic() - self._since > LONGEST:
                    self._since = time.monotonic()
            if is_long:
                gc.collect()


full_collections = _FullCollections()
