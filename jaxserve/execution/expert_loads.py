"""How many tokens each expert has had: read from the device without waiting for it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class ExpertLoads:
    """The totals of counters on the device, which begin again at 2**32."""

    def __init__(self) -> None:
        """Begin with nothing read."""
        self._total: np.ndarray | None = None
        self._last: np.ndarray | None = None
        self._copy: Any = None

    def read(self, counts: jax.Array, *, wait: bool) -> np.ndarray:
        """Return the totals as of the last copy that has arrived, and begin another one of the counters, which steps
        are about to change. With `wait`, return those of now.
        """
        if self._total is None or self._last is None:
            self._total, self._last = np.zeros(counts.shape, np.int64), np.zeros(counts.shape, np.int32)
        if wait:
            self._copy = counts
        if self._copy is not None and (wait or self._copy.is_ready()):
            arrived = np.asarray(self._copy)
            self._total += (arrived - self._last).astype(np.uint32)
            self._last, self._copy = arrived, None
        if self._copy is None and not wait:
            self._copy = jnp.copy(counts)
            self._copy.copy_to_host_async()
        return self._total
