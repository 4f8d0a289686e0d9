"""What a profile of the device says: how much of the time it was at work, and at what."""

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
    """Of all of them."""


def read_profile(folder: pathlib.Path) -> list[Work]:
    """What GPUs ran while `start_profile` recorded into the folder, in the order in which it began."""
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
    """What ran in the second half of the time from the first start to the last end, and how many nanoseconds that is.

    The second half, since a batch of requests starts with their prefill, and a profile with what is slow at first.
    """
    end = max(piece.end for piece in work)
    begin = (min(piece.start for piece in work) + end) / 2
    return [piece._replace(start=max(piece.start, begin)) for piece in work if piece.end > begin], end - begin


def busy_share(work: list[Work]) -> float | None:
    """The share of the second half of a profile's time during which its GPU ran something, None if it saw no GPU."""
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
