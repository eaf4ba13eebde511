"""Processes, files and server trees by an identity that is never reused; and the end of a tree.

A process is its pid *and* start time, a file its path *and* inode. Nothing is ever found by name.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness.records import Record

# A supervisor that lost its harness stops its tree by itself: 20 s of grace and what SIGKILL takes.
SUPERVISOR_PATIENCE_S = 40.0
KILL_S = 10.0


@dataclass(frozen=True)
class OwnedProcess(Record):
    """A process by pid and start time (clock ticks since boot): together they are never reused."""

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class OwnedPath(Record):
    """A file or directory by path and inode: something put there later is not ours."""

    path: str
    device: int
    inode: int


@dataclass(frozen=True)
class OwnedServer(Record):
    """One server tree. ``supervisor`` None: it ended before it could be looked at."""

    arm: str
    port: int
    supervisor: OwnedProcess | None
    processes: tuple[OwnedProcess, ...] = ()
    shared_memory: tuple[OwnedPath, ...] = ()


def stat_fields(pid: int) -> tuple[str, list[str]] | None:
    """(name, fields from the third on) of /proc/PID/stat; None when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            text = file.read()
    except OSError:
        return None
    return text[text.index("(") + 1 : text.rindex(")")], text.rpartition(")")[2].split()


def start_ticks(pid: int) -> int | None:
    """Start time in clock ticks since boot; None when the process has ended."""
    found = stat_fields(pid)
    return None if found is None or found[1][0] in "ZX" else int(found[1][19])


def lives(process: OwnedProcess) -> bool:
    """True when it is this very process that has the pid."""
    return start_ticks(process.pid) == process.start_ticks


def kill(processes: Iterable[OwnedProcess]) -> list[OwnedProcess]:
    """SIGKILL to those that live, and waits for their end; returns those it was sent to.

    A process descriptor is opened before the start time is compared, so no reused pid is ever hit.
    """
    hit = []
    for process in processes:
        try:
            descriptor = os.pidfd_open(process.pid)
        except OSError:
            continue
        try:
            if lives(process):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    hit.append(process)
        finally:
            os.close(descriptor)
    deadline = time.monotonic() + KILL_S
    while any(lives(process) for process in hit) and time.monotonic() < deadline:
        time.sleep(0.02)  # polling for processes to end, bounded by the deadline
    return hit


def descendants(pid: int) -> list[int]:
    """Pids of all descendants, in order."""
    try:
        return sorted(child.pid for child in psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def boot_id() -> str:
    """Names this boot of this kernel; pids and start times mean nothing across two."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def pid_namespace() -> str:
    """Names the numbering of pids: two containers of one machine have two."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"


def owned_path(path: str) -> OwnedPath | None:
    """The path with the inode that is there now; None when nothing is."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return OwnedPath(path, status.st_dev, status.st_ino)


def is_same(owned: OwnedPath) -> bool:
    """True when what lies there is what was recorded."""
    return owned_path(owned.path) == owned


def end_server(server: OwnedServer, patience_s: float) -> list[OwnedProcess]:
    """Leaves the stop to the supervisor while it lives, then kills what is left."""
    recorded = list(server.processes)
    if server.supervisor is not None:
        deadline = time.monotonic() + patience_s
        while lives(server.supervisor) and time.monotonic() < deadline:
            time.sleep(0.05)  # polling for a process to end, bounded by the deadline
        recorded.append(server.supervisor)
    # A recorded process that lives may have children that nobody recorded.
    for process in list(recorded):
        if lives(process):
            children = [(pid, start_ticks(pid)) for pid in descendants(process.pid)]
            recorded += [OwnedProcess(pid, ticks) for pid, ticks in children if ticks is not None]
    return kill(dict.fromkeys(recorded))
