"""The CPUs that this process may use, for sizing pools of threads and worker processes, and who goes first on them."""

import math
import os
import pathlib
import sys
import threading

BACKGROUND_NICENESS = 10
"""A thread of this niceness gets a tenth of a processor that a thread of the usual priority wants, too: work in the
background still comes to an end on a machine that is always busy.
"""


def num_usable_cpus() -> int:
    """Return the CPUs of the process's affinity mask, or of its cgroups' quota (rounded up) if that is less. At least
    1.
    """
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(num_cpus, cgroup_cpus())))


def cgroup_cpus(
    membership: pathlib.Path = pathlib.Path("/proc/self/cgroup"), root: pathlib.Path = pathlib.Path("/sys/fs/cgroup")
) -> float:
    """Return the CPU seconds per second that the process's cgroups (v1 or v2) allow it, `math.inf` without a quota.

    The result is the minimum over the cgroup and its ancestors. In a container, ancestors that are not visible do not
    count.
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


def yield_processors(task: int | None = None) -> None:
    """Let other processes and threads go first, before a process or this thread, for as long as it lives. Threads have
    a priority of their own on Linux only.
    """
    if task is not None or sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id() if task is None else task, BACKGROUND_NICENESS)
