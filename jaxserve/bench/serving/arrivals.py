"""The time at which each request of a load is sent."""

import numpy as np

from jaxserve.bench.serving.workloads import Call


def arrival_times(calls: list[Call], *, rate: float | None, burstiness: float, seed: int) -> list[float]:
    """Return the send times in seconds after the start, ascending.

    With a rate, gaps are gamma-distributed with mean 1 / rate and shape `burstiness` (1: exponential, a Poisson
    process). Without one, the calls' own arrival times are used, or 0 where there is none.
    """
    if rate is None:
        return [call.arrival or 0.0 for call in calls]
    rng = np.random.default_rng([seed, len(calls)])
    gaps = rng.gamma(shape=burstiness, scale=1 / (rate * burstiness), size=len(calls))
    return np.cumsum(gaps).tolist()
