"""Processor time that others take while a benchmark measures: quiet is shown, not assumed.

Foreign is what the machine spent (user, nice, system and what its host stole) less what this
process and its descendants spent, and less kernel threads: the disk's own work is ours too.
Interrupts belong to nobody and are left out. The kernel counts in ticks, so a watch of half a
second is right to a few hundredths of a core.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

# Of one core, over a whole cell: what the figures of this project are not disturbed by.
ALLOWED_CORES = 0.10
_TICKS_S = 0.02


@dataclass
class ForeignCpu:
    """Watches blocks of time: ``with watch: ...``, as often as wanted; the sums are kept."""

    foreign_s: float = 0.0
    wall_s: float = 0.0

    def __enter__(self) -> Self:
        self._before = _foreign_s()
        self._started = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s += time.monotonic() - self._started
        # Ticks of the machine and of processes are rounded on their own: a little below 0 is 0.
        self.foreign_s = max(0.0, self.foreign_s + _foreign_s() - self._before)

    def add(self, other: ForeignCpu) -> None:
        """Counts what another watch saw as well."""
        self.foreign_s += other.foreign_s
        self.wall_s += other.wall_s

    @property
    def is_loud(self) -> bool:
        """Whether others took more than is allowed, and more than ticks can be wrong by."""
        return self.foreign_s > ALLOWED_CORES * self.wall_s + _TICKS_S

    @property
    def cores(self) -> float:
        """Cores that others kept busy on average; NaN before anything was watched."""
        return self.foreign_s / self.wall_s if self.wall_s else float("nan")


def _foreign_s() -> float:
    return _machine_s() - _own_s() - _kernel_threads_s()


def _machine_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "steal", 0.0))


def _own_s() -> float:
    """This process, its living descendants, and those of them that ended and were waited for."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def _kernel_threads_s() -> float:
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[1] == "2":  # the parent: kthreadd
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
