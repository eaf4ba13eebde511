"""What this process may use of the machine: the smaller of what the host has and what a container
allows it. Standard library only; pure over ``root``, so that a tree made by hand tests it.

Control groups limit at every level: the group of the process and each of its ancestors (v1, v2 and
both at once). Memory left under a limit is limit - usage + file pages the kernel gives back first
(inactive_file); active file pages are not counted, so the figure errs on the low side.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
# Version 1 writes "no limit" as the largest multiple of the page size.
_NO_LIMIT = 2**62
_SYS_QUOTACTL_FD = 443  # the same number on every architecture
_Q_GETQUOTA = 0x800007
_DQBLK = struct.Struct("=8QI4x")


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that can be taken now, and what bounds them, for a message."""

    available_bytes: int
    bound: str


def memory_budget(root: Path = ROOT) -> MemoryBudget:
    """The tightest of the host's available memory and every control group's. Raises OSError."""
    bounds = [MemoryBudget(_host_available(root), "available memory of the machine")]
    for group in _groups(root, "memory"):
        limit = _limit(group)
        if limit is None:
            continue
        usage = _number(group / "memory.current", group / "memory.usage_in_bytes") or 0
        reclaimable = _reclaimable(group)
        left = max(0, limit - usage + min(reclaimable, usage))
        shown = "/" + str(group.relative_to(root))
        text = f"limit {limit} of {shown}, {usage} used, {reclaimable} of it reclaimable"
        bounds.append(MemoryBudget(left, text))
    return min(bounds, key=lambda bound: bound.available_bytes)


def pool_problem(pool_bytes: int, ranks: int = 1, root: Path = ROOT) -> str:
    """Why a pool of ``pool_bytes`` for each of ``ranks`` local workers is too large; "" if not."""
    try:
        budget = memory_budget(root)
    except (OSError, ValueError) as error:
        return f"host_pool_bytes: found {pool_bytes}; what is available cannot be read: {error}"
    wanted = pool_bytes * ranks
    if wanted <= budget.available_bytes:
        return ""
    each = f" for each of {ranks} local ranks = {wanted} bytes" if ranks > 1 else ""
    return (
        f"host_pool_bytes: found {pool_bytes}{each}; allowed: {budget.available_bytes} bytes "
        f"({budget.bound})"
    )


def cpu_budget(root: Path = ROOT) -> float:
    """Cores this process may use at once: its affinity, or less where a group has a quota."""
    quotas = [quota for group in _groups(root, "cpu") if (quota := _quota(group)) is not None]
    return min([float(len(os.sched_getaffinity(0))), *quotas])


def disk_free_bytes(directory: Path) -> int:
    """Bytes that can be written under a directory: free space, or what a disk quota leaves.

    Quotas of the user and the group where the kernel tells them (quotactl_fd, Linux 5.14);
    one that cannot be read bounds nothing. Raises OSError.
    """
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    owners = ((0, os.getuid()), (1, os.getgid()))  # USRQUOTA, GRPQUOTA
    left = [_quota_left(directory, kind, owner) for kind, owner in owners]
    return min([free, *(bytes_left for bytes_left in left if bytes_left is not None)])


def _quota_left(directory: Path, kind: int, owner: int) -> int | None:
    """quotactl(2): struct if_dqblk has its limits in units of 1 KiB and its usage in bytes."""
    libc = ctypes.CDLL(None, use_errno=True)
    answer = ctypes.create_string_buffer(_DQBLK.size)
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        command = _Q_GETQUOTA << 8 | kind
        if libc.syscall(_SYS_QUOTACTL_FD, descriptor, command, owner, answer) != 0:
            return None
    finally:
        os.close(descriptor)
    hard, soft, used, *_ = _DQBLK.unpack(answer.raw)
    limits = [limit * 1024 for limit in (hard, soft) if limit]
    return max(0, min(limits) - used) if limits else None


def _host_available(root: Path) -> int:
    path = root / "proc" / "meminfo"
    for line in path.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no MemAvailable")


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Directories of this process's group and its ancestors, as far as the mount shows them."""
    try:
        memberships = (root / "proc" / "self" / "cgroup").read_text().splitlines()
        mounts = (root / "proc" / "self" / "mountinfo").read_text().splitlines()
    except OSError:
        return  # a kernel without control groups
    paths = {}
    for line in memberships:
        _hierarchy, controllers, group = line.split(":", 2)
        for each in controllers.split(","):
            paths[each] = group  # version 2 has an empty name
    for line in mounts:
        before, _, after = line.partition(" - ")
        top, mount = (_unescaped(field) for field in before.split()[3:5])
        kind, _source, options = after.split(maxsplit=2)
        if kind == "cgroup2":
            path = paths.get("")
        elif kind == "cgroup" and controller in options.split(","):
            path = paths.get(controller)
        else:
            continue
        if path is not None:
            yield from _upwards(root / mount.lstrip("/"), top, path)


def _upwards(mount: Path, top: str, path: str) -> Iterator[Path]:
    """From the group of the process up to the mount. ``top``: the group that the mount shows."""
    try:
        below = PurePosixPath(path).relative_to(top)
    except ValueError:
        below = PurePosixPath()  # of another namespace: the mount itself is all that can be seen
    if ".." in below.parts:
        below = PurePosixPath()
    for group in (below, *below.parents):
        if (mount / group).is_dir():
            yield mount / group


def _unescaped(field: str) -> str:
    """mountinfo writes blanks as octal."""
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _limit(group: Path) -> int | None:
    """Memory a group may use. ``memory.high`` throttles instead of killing; it bounds as well."""
    found = [
        _number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
    ]
    limits = [limit for limit in found if limit is not None and limit < _NO_LIMIT]
    return min(limits, default=None)


def _reclaimable(group: Path) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split() for line in lines if len(line.split()) == 2)
    # Version 1 counts descendants under total_ only, version 2 always.
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _quota(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        limit, span = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        return limit / span if limit and span and limit > 0 else None
    return None if quota == "max" else int(quota) / int(period)


def _number(*paths: Path) -> int | None:
    """The number in the first file that has one; "max" and what cannot be read are none."""
    for path in paths:
        try:
            return int(path.read_text())
        except (OSError, ValueError):
            continue
    return None
