"""What a container leaves: trees made by hand and, where the kernel allows, a real group."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.connector import budget
from harness.connector.budget import MemoryBudget, cpu_budget, memory_budget, pool_problem

GIB = 2**30
MEMORY = Path("/sys/fs/cgroup/memory")
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
NO_LIMIT_V1 = 9223372036854771712


def tree(
    root: Path, *, available: int = 8 * GIB, cgroup: str = "", mounts: str = "", **files: str
) -> Path:
    """A root with /proc and group files. Keys of ``files``: path below /sys/fs/cgroup."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(
        f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n"
    )
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    (root / "proc" / "self" / "mountinfo").write_text(mounts)
    for name, text in files.items():
        path = root / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def v2(root: Path, **files: str) -> Path:
    return tree(root, cgroup="0::/pod/box\n", mounts=V2_MOUNT, **files)


def test_without_a_limit_it_is_the_hosts(tmp_path: Path) -> None:
    root = v2(tmp_path, **{"pod/box/memory.max": "max", "pod/box/memory.current": "5"})
    assert memory_budget(root) == MemoryBudget(8 * GIB, "available memory of the machine")


def test_limit_less_usage_plus_what_can_be_reclaimed(tmp_path: Path) -> None:
    root = v2(
        tmp_path,
        **{
            "pod/box/memory.max": str(2 * GIB),
            "pod/box/memory.current": str(GIB),
            "pod/box/memory.stat": f"anon 7\nfile {GIB // 2}\ninactive_file {GIB // 4}",
        },
    )
    found = memory_budget(root)
    assert found.available_bytes == GIB + GIB // 4
    assert found.bound == (
        f"limit {2 * GIB} of /sys/fs/cgroup/pod/box, {GIB} used, {GIB // 4} of it reclaimable"
    )


def test_an_ancestor_may_be_the_tightest(tmp_path: Path) -> None:
    root = v2(
        tmp_path,
        **{
            "pod/box/memory.max": str(4 * GIB),
            "pod/box/memory.current": "0",
            "pod/memory.max": str(3 * GIB),
            "pod/memory.current": str(2 * GIB),
        },
    )
    assert memory_budget(root).available_bytes == GIB
    assert "/sys/fs/cgroup/pod," in memory_budget(root).bound


def test_high_throttles_and_bounds_too(tmp_path: Path) -> None:
    root = v2(
        tmp_path,
        **{
            "pod/box/memory.max": "max",
            "pod/box/memory.high": str(GIB),
            "pod/box/memory.current": "0",
        },
    )
    assert memory_budget(root).available_bytes == GIB


def test_the_host_may_be_tighter_than_the_limit(tmp_path: Path) -> None:
    root = v2(tmp_path, **{"pod/box/memory.max": str(99 * GIB), "pod/box/memory.current": "0"})
    assert memory_budget(root).available_bytes == 8 * GIB


def test_over_the_limit_nothing_is_left(tmp_path: Path) -> None:
    root = v2(tmp_path, **{"pod/box/memory.max": "10", "pod/box/memory.current": "20"})
    assert memory_budget(root).available_bytes == 0


V1_MOUNT = "35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize(
    ("top", "group"),
    [
        pytest.param("/", "memory/docker/abc", id="the whole hierarchy is mounted"),
        pytest.param("/docker/abc", "memory", id="only the container's own group is"),
        pytest.param("/docker/other", "memory", id="of another namespace"),
    ],
)
def test_version_1_with_its_hierarchical_counts(tmp_path: Path, top: str, group: str) -> None:
    root = tree(
        tmp_path,
        cgroup="4:memory:/docker/abc\n3:cpu,cpuacct:/\n0::/\n",
        mounts=V1_MOUNT.format(top=top),
        **{
            f"{group}/memory.limit_in_bytes": str(2 * GIB),
            f"{group}/memory.usage_in_bytes": str(GIB),
            f"{group}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}",
        },
    )
    assert memory_budget(root).available_bytes == GIB + GIB // 2


def test_version_1_writes_no_limit_as_a_number(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        cgroup="4:memory:/x\n",
        mounts=V1_MOUNT.format(top="/"),
        **{"memory/x/memory.limit_in_bytes": str(NO_LIMIT_V1)},
    )
    assert memory_budget(root).available_bytes == 8 * GIB


def test_a_kernel_without_control_groups(tmp_path: Path) -> None:
    root = tree(tmp_path)
    (root / "proc" / "self" / "cgroup").unlink()
    assert memory_budget(root).available_bytes == 8 * GIB


def test_pools_of_all_local_ranks_count(tmp_path: Path) -> None:
    root = v2(tmp_path, **{"pod/box/memory.max": str(2 * GIB), "pod/box/memory.current": "0"})
    assert pool_problem(GIB, 2, root) == ""
    assert pool_problem(GIB + 1, 1, root) == ""
    assert pool_problem(GIB + 1, 2, root) == (
        f"host_pool_bytes: found {GIB + 1} for each of 2 local ranks = {2 * GIB + 2} bytes; "
        f"allowed: {2 * GIB} bytes (limit {2 * GIB} of /sys/fs/cgroup/pod/box, 0 used, 0 of it "
        "reclaimable)"
    )


def test_memory_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    assert "what is available cannot be read" in pool_problem(1, 1, tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"pod/box/cpu.max": "150000 100000"}, 1.5),
        ({"pod/box/cpu.max": "max 100000", "pod/cpu.max": "50000 100000"}, 0.5),
        ({"pod/box/cpu.max": "max 100000"}, 4.0),
    ],
)
def test_cores_by_quota_and_affinity(
    files: dict[str, str], expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget.os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    assert cpu_budget(v2(tmp_path, **files)) == expected


def test_cores_of_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget.os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    root = tree(
        tmp_path,
        cgroup="3:cpu,cpuacct:/x\n",
        mounts="33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n",
        **{"cpu/x/cpu.cfs_quota_us": "250000", "cpu/x/cpu.cfs_period_us": "100000"},
    )
    assert cpu_budget(root) == 2.5
    (root / "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_budget(root) == 4.0


@pytest.mark.parametrize(("quota", "left"), [(None, None), (0, None), (3 * 2**20, 2**20)])
def test_a_disk_quota_bounds_free_space(
    quota: int | None, left: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hard limit 3 MiB, 2 MiB used; 0: no limit; None: no quota on this file system."""

    class Libc:
        def __init__(self, *_: object, **__: object) -> None:
            return

        def syscall(self, _number: int, _fd: int, command: int, _owner: int, answer: object) -> int:
            if quota is None or command & 1:
                return -1
            answer.raw = budget._DQBLK.pack(quota // 1024, 0, 2**21, *[0] * 6)  # type: ignore[attr-defined]
            return 0

    free = os.statvfs(tmp_path)
    monkeypatch.setattr(budget.ctypes, "CDLL", Libc)
    found = budget.disk_free_bytes(tmp_path)
    if left is None:
        assert found > free.f_bavail * free.f_frsize // 2
    else:
        assert found == left


@pytest.fixture
def real_group() -> Iterator[Path]:
    """A group of 2 GiB in the kernel of this machine, version 1 or 2."""
    parent = MEMORY if MEMORY.is_dir() else Path("/sys/fs/cgroup")
    group = parent / f"kvgate-test-{uuid.uuid4().hex}"
    limit = "memory.limit_in_bytes" if MEMORY.is_dir() else "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (group / limit).write_text(str(2 * GIB))
        except OSError as error:
            pytest.skip(f"no memory limit can be set here: {error}")
        yield group
    finally:
        group.rmdir()


def test_a_real_group_of_two_gib_refuses_a_pool_of_three(real_group: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from harness.connector.budget import *\n"
        "Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()))\n"
        "print(pool_problem(3 * 2**30)); print(pool_problem(2**30) or 'fits')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(real_group)], capture_output=True, text=True, check=True
    )
    refused, fits = result.stdout.splitlines()
    assert refused.startswith(f"host_pool_bytes: found {3 * GIB}; allowed: ")
    assert f"limit {2 * GIB} of {real_group}, " in refused
    assert int(refused.split("allowed: ")[1].split()[0]) < 2 * GIB
    assert fits == "fits"
