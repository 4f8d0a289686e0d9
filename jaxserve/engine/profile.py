"""What a profile of the device says: how much of the time it was at work."""

import pathlib
from collections.abc import Iterable

import jax


def busy_share(folder: pathlib.Path) -> float | None:
    """The share of the second half of a profile's time during which its GPU ran something, None if it saw no GPU.

    The second half, since a batch of requests starts with their prefill. `folder` is what `start_profile` was given.
    """
    [path] = folder.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(path))
    events = [
        (event.start_ns, event.start_ns + event.duration_ns)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    return busy_share_of(events) if events else None


def busy_share_of(events: Iterable[tuple[float, float]]) -> float:
    """The share of the second half of the time from the first start to the last end that some (start, end) covers."""
    events = sorted(events)
    first, last = events[0][0], max(end for _, end in events)
    begin = (first + last) / 2
    covered, reached = 0.0, begin
    for start, end in events:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / (last - begin)
