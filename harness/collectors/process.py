"""What the operating system says of the server's processes: disk reads, memory, start time."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

from harness.records import MetricSample

QUANTITIES = ("disk_read_bytes", "rss_bytes", "start_time_s")


def read_processes(pids: Iterable[int], *, mark: str) -> list[MetricSample]:
    """Three samples per process. ``disk_read_bytes``: block device reads, of /proc/PID/io.

    Reads served by the page cache do not count there, which is what makes it a witness.
    """
    samples = []
    for pid in pids:
        t_ns = time.monotonic_ns()
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                labels = {"pid": str(pid), "process": process.name()}
                values = (
                    float(process.io_counters().read_bytes),
                    float(process.memory_info().rss),
                    process.create_time(),
                )
        except (psutil.NoSuchProcess, psutil.AccessDenied) as error:
            labels = {"pid": str(pid)}
            failed = type(error).__name__
            samples += [
                MetricSample(t_ns, mark, "process", name, None, labels, failed)
                for name in QUANTITIES
            ]
            continue
        samples += [
            MetricSample(t_ns, mark, "process", name, value, labels)
            for name, value in zip(QUANTITIES, values, strict=True)
        ]
    return samples
