"""Estimate what fraction of the device's memory bandwidth the engine's steps use, for the metrics."""

MIN_INTERVAL = 0.05
"""Seconds of steps that an estimate is made from, at least."""


class BandwidthMeter:
    """A step reads `weight_bytes` once and the KV of every running request, whatever else it does. A step of several
    tokens may read more experts than these weights have, so that of their models the estimate is too low.

    `peak` is that of all devices together, in bytes a second; None, for a kind that is not known, makes every ratio 0.
    """

    def __init__(self, *, weight_bytes: int, bytes_per_position: int, peak: float | None):
        self._weight_bytes = weight_bytes
        self._bytes_per_position = bytes_per_position
        self._peak = peak
        self._num_steps = 0
        self._seconds = 0.0
        self._ratio = 0.0

    def ratio(self, *, num_steps: int, seconds: float, num_positions: int) -> float:
        """Return the fraction of the peak bandwidth used since the last estimate.

        `num_steps` and `seconds` count from the engine's start; `num_positions` is the number of KV positions that
        currently hold tokens of running requests.
        """
        steps, spent = num_steps - self._num_steps, seconds - self._seconds
        if self._peak is not None and spent >= MIN_INTERVAL:
            num_bytes = steps * (self._weight_bytes + num_positions * self._bytes_per_position)
            self._ratio = num_bytes / spent / self._peak
            self._num_steps, self._seconds = num_steps, seconds
        return self._ratio if num_positions else 0.0
