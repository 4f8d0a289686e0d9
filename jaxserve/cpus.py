"""How many CPUs this process may use: what sizes pools of threads and worker processes."""

import math
import os
import pathlib


def num_usable_cpus() -> int:
    """CPUs of the process's affinity mask or, where that is less, of its cgroups' quota (rounded up). At least 1."""
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(num_cpus, cgroup_cpus())))


def cgroup_cpus(
    membership: pathlib.Path = pathlib.Path("/proc/self/cgroup"), root: pathlib.Path = pathlib.Path("/sys/fs/cgroup")
) -> float:
    """CPU seconds a second that the process's cgroups (v1 or v2) allow it, `math.inf` without a quota.

    The least of the cgroup's own quota and those of the groups around it. In a container, groups above its own may be
    out of sight: they do not count.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return math.inf
    quota = math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # v2
            top, read = root, _quota_v2
        elif "cpu" in controllers.split(","):
            top, read = root / "cpu", _quota_v1
        else:
            continue
        own = top / path.lstrip("/")
        for folder in (own, *own.parents[: len(own.relative_to(top).parts)]):
            try:
                quota = min(quota, read(folder))
            except (OSError, ValueError):
                continue
    return quota


def _quota_v2(folder: pathlib.Path) -> float:
    quota, period = (folder / "cpu.max").read_text().split()
    return math.inf if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: pathlib.Path) -> float:
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    return math.inf if quota < 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
