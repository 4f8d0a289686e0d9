"""make_scheduler: from engine options to the Scheduler of the engine's loop."""

from typing import Literal

from jaxserve.scheduling.base import RowOutcome, Scheduler, SchedulerLimits, SchedulerStats
from jaxserve.scheduling.continuous import ContinuousScheduler
from jaxserve.scheduling.static import StaticScheduler

__all__ = ["RowOutcome", "Scheduler", "SchedulerLimits", "SchedulerStats", "make_scheduler"]


def make_scheduler(
    kind: Literal["continuous", "static"],
    limits: SchedulerLimits,
    *,
    enable_prefix_caching: bool = True,
    model_domain: bytes = b"",
) -> Scheduler:
    """Make the scheduler of this kind. The static one shares no prefixes, whatever `enable_prefix_caching` says.

    `model_domain` identifies everything that KV depends on besides tokens (the model, its dtype). Raises ConfigError.
    """
    if kind == "static":
        return StaticScheduler(limits)
    return ContinuousScheduler(limits, enable_prefix_caching=enable_prefix_caching, model_domain=model_domain)
