"""Estimate how fast requests leave the engine, for the `Retry-After` of requests that find its queue full."""

import math

MIN_WAIT = 1.0
MAX_WAIT = 60.0
WINDOW = 60.0
"""Seconds of work after which a departure counts for a third only (1 / e)."""


class Departures:
    """Counts the requests that have finished or been given up. Times are seconds that the engine has worked so far, so
    that hours without a request say nothing of its speed.
    """

    def __init__(self):
        self._weight = 0.0  # departures, each by its age at `_last`
        self._last = 0.0

    def count(self, number: int, *, now: float) -> None:
        """Count `number` departures."""
        if number:
            self._weight = self._weight_at(now) + number
            self._last = now

    def wait(self, number: int, *, now: float) -> float:
        """Return the seconds in which `number` requests leave at the recent rate, within [MIN_WAIT, MAX_WAIT]; MIN_WAIT
        if none ever has.
        """
        if not self._weight or now <= 0:
            return MIN_WAIT
        # The mean of an exponentially weighted count, with Adam's correction for the time before it began.
        rate = self._weight_at(now) / (WINDOW * -math.expm1(-now / WINDOW))
        return MAX_WAIT if number >= MAX_WAIT * rate else max(MIN_WAIT, number / rate)

    def _weight_at(self, now: float) -> float:
        return self._weight * math.exp((self._last - now) / WINDOW)
