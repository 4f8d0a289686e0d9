"""Full garbage collections, which visit all that jax and the start of an engine have left: they hold a step up for a
tenth of a second or more.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator


class _FullCollections:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_waiting_for = 0
        self._threshold = 0

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """Put full collections off until no thread is inside. All but cycles that have outlived the other collections
        is freed meanwhile as ever.
        """
        with self._lock:
            if not self._num_waiting_for:
                first, second, self._threshold = gc.get_threshold()
                gc.set_threshold(first, second, 2**31 - 1)
            self._num_waiting_for += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_waiting_for -= 1
                if not self._num_waiting_for:
                    first, second, _ = gc.get_threshold()
                    gc.set_threshold(first, second, self._threshold)


full_collections = _FullCollections()
