"""What the operating system says of the server's processes: disk reads, memory, start time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable

import psutil

from harness.collectors.prometheus import Page
from harness.records import MetricSample

# What a simulated medium has read, counted apart from the connector's own counters.
SIMULATED_READS = "sim:disk_read_bytes_total"
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


def with_simulated_reads(samples: Iterable[MetricSample], page: str) -> list[MetricSample]:
    """The samples of a simulated server, whose tiers lie in memory: /proc would tell of no read.

    The first process gets what the simulated medium counted, the others zero. Without that series
    none has a value: absent is never zero.
    """
    reads = [r.value for r in Page(page).readings(SIMULATED_READS) if r.value is not None]
    left: list[float | None] = [*reads[:1]]
    found = []
    for sample in samples:
        if sample.name == "disk_read_bytes" and sample.value is not None:
            value = None if not reads else left.pop() if left else 0.0
            labels = {**sample.labels, "witness": "simulated medium"}
            error = None if reads else f"{SIMULATED_READS} is absent from /metrics"
            sample = dataclasses.replace(sample, value=value, labels=labels, error=error)
        found.append(sample)
    return found
