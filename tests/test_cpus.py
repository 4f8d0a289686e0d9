"""The number of threads and processes follows the CPUs of this process, not those of the machine."""

import math
import os
import sys
import threading

import pytest

from jaxserve import cpus
from jaxserve.cpus import cgroup_cpus, num_usable_cpus


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {}, math.inf),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "300000 100000\n"}, 0.5),
        ("0::/../outside\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "of another kernel\n"}, math.inf),
        (
            "5:memory:/a\n4:cpu,cpuacct:/host/a\n3:cpuset:/\n0::/\n",  # a container that sees its own groups at the top
            {"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            4,
        ),
        ("2:cpuacct:/\n1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
    ],
)
def test_the_quota_of_cgroups(tmp_path, membership, files, expected):
    root = tmp_path / "cgroup"
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    (tmp_path / "membership").write_text(membership)
    assert cgroup_cpus(tmp_path / "membership", root) == expected


def test_without_cgroups_there_is_no_quota(tmp_path):
    assert cgroup_cpus(tmp_path / "none") == math.inf


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_cpus_follow_affinity_and_quota(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5})
    for quota, expected in ((math.inf, 3), (1.5, 2), (0.1, 1), (8, 3)):
        monkeypatch.setattr(cpus, "cgroup_cpus", lambda quota=quota: quota)
        assert num_usable_cpus() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own on this system")
def test_a_thread_lets_others_go_first_and_no_other_thread_does():
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    seen = []

    def work():
        cpus.yield_processors()
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [max(before, cpus.BACKGROUND_NICENESS)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
