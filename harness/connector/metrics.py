"""Counts the tier's work and gives it Prometheus names. Standard library only.

A step's statistics are a plain mapping, merged by ``merge``: counters add up, gauges are replaced,
load times are listed. Only ``TierPromMetrics`` turns them into metrics, in the API server.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

LOAD_SECONDS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip

# Short name (with its tier, if it has one) -> what it counts. Metric:
# kvgate:tier_<name>_total{tier=...}.
COUNTERS: dict[str, str] = {
    "hit_tokens": "Tokens restored into device blocks, by the tier that supplied them.",
    "read_bytes": "Payload bytes restored into device blocks, by the tier that supplied them.",
    "write_bytes": "Payload bytes written into the tier.",
    "file_read_bytes": "Bytes read from block files, header pages and padding included.",
    "load_failed_blocks": "Blocks that could not be loaded and are recomputed.",
    "verify_failed_blocks": "Block files that were damaged or not what their name says.",
    "dropped_store_blocks": "Completed blocks not stored, for want of a host slot or by an error.",
}
TIERED_COUNTERS = ("hit_tokens", "read_bytes", "write_bytes")
TIERS = ("host", "disk")
GAUGES: dict[str, str] = {
    "store_backlog_blocks": "Blocks in host memory that wait to become durable on disk.",
    "host_used_bytes": "Bytes of host slots in use.",
    "host_capacity_bytes": "Bytes of all host slots.",
    "disk_enabled": "1 when the disk tier is configured and usable.",
    "direct_io": "1 when block files bypass the page cache (O_DIRECT).",
}
PREFIX = "kvgate:tier_"


class TierCounters:
    """Counts since the last ``take``. Used from the worker's thread only."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = defaultdict(int)
        self.load_seconds: list[float] = []

    def add(self, name: str, amount: int = 1) -> None:
        """``name`` is a key of ``COUNTERS``, with ``.host`` or ``.disk`` where it has a tier."""
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
        for name, text in COUNTERS.items():
            tiers = TIERS if name in TIERED_COUNTERS else ()
            family = counter_class(
                name=PREFIX + name,
                documentation=text,
                labelnames=[*label_names, "tier"] if tiers else label_names,
            )
            for engine, values in label_values.items():
                for tier in tiers:
                    self._counters[engine, f"{name}.{tier}"] = family.labels(*values, tier)
                if not tiers:
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
