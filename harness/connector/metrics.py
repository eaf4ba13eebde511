"""Counts the tier's work and gives it Prometheus names. Standard library only.

A step's statistics are a plain mapping, merged by ``merge``: counters add up, gauges are replaced,
load times are listed. Only ``TierPromMetrics`` turns them into metrics, in the API server.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LOAD_SECONDS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip

TIERS = ("host", "disk")
# Why a block of a load was recomputed, and why a completed block was not stored.
LOAD_FAILURES = ("damaged", "gone", "unreadable", "overdue", "sick", "lost")
DROP_REASONS = ("no_slot", "no_space", "io_error", "sick", "error")


@dataclass(frozen=True)
class Family:
    """A counter: what it counts, and the label that tells its parts apart."""

    text: str
    label: str = ""
    values: tuple[str, ...] = ()


# Short name -> counter. Metric: kvgate:tier_<name>_total; a part is called "<name>.<value>" here.
COUNTERS: dict[str, Family] = {
    "hit_tokens": Family(
        "Tokens restored into device blocks, by the tier that supplied them.", "tier", TIERS
    ),
    "read_bytes": Family(
        "Payload bytes restored into device blocks, by the tier that supplied them.", "tier", TIERS
    ),
    "read_seconds": Family(
        "Seconds of copying host slots to device blocks, and of reading files (summed over "
        "threads).",
        "tier",
        TIERS,
    ),
    "write_bytes": Family("Payload bytes written into the tier.", "tier", TIERS),
    "write_seconds": Family(
        "Seconds of copying device blocks to host slots, and of writing files (summed over "
        "threads).",
        "tier",
        TIERS,
    ),
    "stored_blocks": Family("Blocks written into the tier.", "tier", TIERS),
    "evicted_blocks": Family("Blocks removed to make room.", "tier", TIERS),
    "file_read_bytes": Family("Bytes read from block files, header pages and padding included."),
    "prefetched_blocks": Family("Blocks read from files before their request was scheduled."),
    "load_failed_blocks": Family(
        "Blocks that could not be loaded and are recomputed.", "reason", LOAD_FAILURES
    ),
    "missing_files": Family(
        "Block files that were gone when they were read: evicted by another server, or deleted."
    ),
    "verify_failed_blocks": Family("Block files that were damaged or not what their name says."),
    "dropped_store_blocks": Family("Completed blocks not stored.", "reason", DROP_REASONS),
    "io_errors": Family("Failed file operations.", "op", ("read", "write")),
    "breaker_opened": Family("Times the directory was found sick and left alone."),
}
GAUGES: dict[str, str] = {
    "serving": "1 when the tier stores and answers; 0 when it was refused.",
    "store_backlog_blocks": "Blocks in host memory that wait to become durable on disk.",
    "host_used_bytes": "Bytes of host slots in use.",
    "host_capacity_bytes": "Bytes of all host slots.",
    "read_queue_blocks": "File reads queued or running.",
    "disk_used_bytes": "Bytes of block files in the directory, of all its users.",
    "disk_capacity_bytes": "Bound on disk_used_bytes; 0 when only free space bounds it.",
    "breaker_state": "0 the directory is used, 1 it is sick and left alone, 2 it is being probed.",
    "disk_enabled": "1 when the disk tier is configured and usable.",
    "direct_io": "1 when block files bypass the page cache (O_DIRECT).",
}
PREFIX = "kvgate:tier_"


class TierCounters:
    """Counts since the last ``take``. Used from the worker's thread only."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = defaultdict(int)
        self.load_seconds: list[float] = []

    def add(self, name: str, amount: float = 1) -> None:
        """``name`` is a key of ``COUNTERS``, with ``.<value>`` where it has a label."""
        if amount:
            self._counts[name] += amount

    def take(self, block_tokens: int) -> dict[str, Any]:
        """The step's statistics; starts counting anew."""
        counts, self._counts = dict(self._counts), defaultdict(int)
        seconds, self.load_seconds = self.load_seconds, []
        for tier in TIERS:
            if blocks := counts.pop(f"hit_blocks.{tier}", 0):
                counts[f"hit_tokens.{tier}"] = blocks * block_tokens
        return {"counters": counts, "gauges": {}, "load_seconds": seconds}


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Combines two steps' statistics, ``second`` being the later one. Pure."""
    counters = dict(first.get("counters", {}))
    for name, amount in second.get("counters", {}).items():
        counters[name] = counters.get(name, 0) + amount
    return {
        "counters": counters,
        "gauges": {**first.get("gauges", {}), **second.get("gauges", {})},
        "load_seconds": [*first.get("load_seconds", []), *second.get("load_seconds", [])],
    }


def summarise(statistics: Mapping[str, Any]) -> dict[str, int | float]:
    """The statistics as one flat line for the log. Pure."""
    seconds = statistics.get("load_seconds", [])
    line: dict[str, int | float] = {
        **statistics.get("counters", {}),
        **statistics.get("gauges", {}),
    }
    line["loads"] = len(seconds)
    if seconds:
        line["load_s_max"] = round(max(seconds), 4)
    return line


class TierMetricSet:
    """The Prometheus metrics; every series exists, at zero, from the start.

    Args:
        counter_class, gauge_class, histogram_class: prometheus_client's, or the stand-ins that vLLM
        passes. label_names: vLLM's own labels. label_values: by engine index.
    """

    def __init__(
        self,
        counter_class: Any,
        gauge_class: Any,
        histogram_class: Any,
        label_names: list[str],
        label_values: Mapping[int, list[object]],
    ) -> None:
        self._counters: dict[tuple[int, str], Any] = {}
        self._gauges: dict[tuple[int, str], Any] = {}
        self._load_seconds: dict[int, Any] = {}
        for name, counter in COUNTERS.items():
            family = counter_class(
                name=PREFIX + name,
                documentation=counter.text,
                labelnames=[*label_names, counter.label] if counter.label else label_names,
            )
            for engine, values in label_values.items():
                for part in counter.values:
                    self._counters[engine, f"{name}.{part}"] = family.labels(*values, part)
                if not counter.label:
                    self._counters[engine, name] = family.labels(*values)
        for name, text in GAUGES.items():
            family = gauge_class(
                name=PREFIX + name,
                documentation=text,
                labelnames=label_names,
                multiprocess_mode="mostrecent",
            )
            for engine, values in label_values.items():
                self._gauges[engine, name] = family.labels(*values)
        family = histogram_class(
            name=PREFIX + "load_seconds",
            documentation="Seconds from the start of a request's load to its end.",
            labelnames=label_names,
            buckets=LOAD_SECONDS_BUCKETS,
        )
        for engine, values in label_values.items():
            self._load_seconds[engine] = family.labels(*values)

    def observe(self, statistics: Mapping[str, Any], engine: int) -> None:
        """Takes in one step's statistics of one engine."""
        for name, amount in statistics.get("counters", {}).items():
            self._counters[engine, name].inc(amount)
        for name, value in statistics.get("gauges", {}).items():
            self._gauges[engine, name].set(value)
        for seconds in statistics.get("load_seconds", []):
            self._load_seconds[engine].observe(seconds)
