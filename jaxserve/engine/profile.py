"""Evaluate a profile of the device: how much of the time it was busy, and with what."""

import collections
import pathlib
from typing import NamedTuple

import jax


class Work(NamedTuple):
    """A kernel or a copy on a stream of a GPU; times in nanoseconds."""

    start: float
    end: float
    name: str


class WorkTimes(NamedTuple):
    """All runs of one kernel, or copies of one kind."""

    name: str
    num_runs: int
    seconds: float
    """Total time of all runs."""


def read_profile(folder: pathlib.Path) -> list[Work]:
    """Return what GPUs ran while `start_profile` recorded into the folder, in order of start."""
    [path] = folder.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(path))
    return sorted(
        Work(event.start_ns, event.start_ns + event.duration_ns, event.name)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    )


def second_half(work: list[Work]) -> tuple[list[Work], float]:
    """Return what ran in the second half between the first start and the last end, and its length in nanoseconds.

    The first half is skipped because a batch of requests starts with prefill, and a profile with slow first calls.
    """
    end = max(piece.end for piece in work)
    begin = (min(piece.start for piece in work) + end) / 2
    return [piece._replace(start=max(piece.start, begin)) for piece in work if piece.end > begin], end - begin


def busy_fraction(work: list[Work]) -> float | None:
    """Return the fraction of a profile's second half during which its GPU was busy, None if it saw no GPU."""
    if not work:
        return None
    late, span = second_half(work)
    covered, reached = 0.0, 0.0
    for start, end, _ in sorted(late):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / span


def times_by_name(work: list[Work]) -> list[WorkTimes]:
    """Whatever took the most time in all first."""
    runs: dict[str, list[float]] = collections.defaultdict(list)
    for start, end, name in work:
        runs[name].append(end - start)
    times = [WorkTimes(name, len(durations), sum(durations) / 1e9) for name, durations in runs.items()]
    return sorted(times, key=lambda times: -times.seconds)
