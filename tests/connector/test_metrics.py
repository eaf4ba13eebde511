"""Statistics: merging, and the exact series on /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from harness.connector.metrics import TierCounters, TierMetricSet, merge, summarise

SERIES = {
    f"kvgate:tier_{name}"
    for name in (
        *(
            f'{counter}_total{{engine="0",tier="{tier}"}}'
            for counter in (
                "hit_tokens", "read_bytes", "read_seconds", "write_bytes", "write_seconds",
                "stored_blocks", "evicted_blocks",
            )
            for tier in ("host", "disk")
        ),
        *(
            f'load_failed_blocks_total{{engine="0",reason="{reason}"}}'
            for reason in ("damaged", "gone", "unreadable", "overdue", "sick", "lost")
        ),
        *(
            f'dropped_store_blocks_total{{engine="0",reason="{reason}"}}'
            for reason in ("no_slot", "no_space", "io_error", "sick", "error")
        ),
        *(f'io_errors_total{{engine="0",op="{op}"}}' for op in ("read", "write")),
        *(
            f'{counter}_total{{engine="0"}}'
            for counter in (
                "file_read_bytes", "prefetched_blocks", "missing_files", "verify_failed_blocks",
                "breaker_opened",
            )
        ),
        *(
            f'{gauge}{{engine="0"}}'
            for gauge in (
                "serving", "store_backlog_blocks", "read_queue_blocks", "host_used_bytes",
                "host_capacity_bytes", "disk_used_bytes", "disk_capacity_bytes", "disk_enabled",
                "direct_io", "breaker_state", "load_seconds_count", "load_seconds_sum",
            )
        ),
    )
}  # fmt: skip


def _set() -> tuple[TierMetricSet, CollectorRegistry]:
    registry = CollectorRegistry()

    def in_registry(kind: type) -> object:
        return lambda **options: kind(registry=registry, **options)

    metrics = TierMetricSet(
        in_registry(Counter), in_registry(Gauge), in_registry(Histogram), ["engine"], {0: ["0"]}
    )
    return metrics, registry


def _values(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {
        name: float(value)
        for name, value in pairs
        if "_bucket" not in name and "_created" not in name
    }


def test_every_series_exists_at_zero_from_the_start() -> None:
    assert _values(_set()[1]) == dict.fromkeys(SERIES, 0.0)


def test_observations_arrive() -> None:
    metrics, registry = _set()
    for _ in range(2):
        metrics.observe(
            {
                "counters": {"hit_tokens.disk": 128, "load_failed_blocks.gone": 1},
                "gauges": {"store_backlog_blocks": 3},
                "load_seconds": [0.5, 0.25],
            },
            0,
        )
    values = _values(registry)
    assert values['kvgate:tier_hit_tokens_total{engine="0",tier="disk"}'] == 256
    assert values['kvgate:tier_load_failed_blocks_total{engine="0",reason="gone"}'] == 2
    assert values['kvgate:tier_store_backlog_blocks{engine="0"}'] == 3
    assert values['kvgate:tier_load_seconds_sum{engine="0"}'] == 1.5


def test_take_converts_blocks_to_tokens_and_starts_anew() -> None:
    counters = TierCounters()
    counters.add("hit_blocks.host", 2)
    counters.add("read_bytes.host", 10)
    counters.load_seconds.append(0.5)
    assert counters.take(128) == {
        "counters": {"read_bytes.host": 10, "hit_tokens.host": 256},
        "gauges": {},
        "load_seconds": [0.5],
    }
    assert counters.take(128) == {"counters": {}, "gauges": {}, "load_seconds": []}


def test_merge_adds_counters_and_keeps_the_later_gauge() -> None:
    first = {"counters": {"a": 1}, "gauges": {"g": 1, "h": 1}, "load_seconds": [1.0]}
    second = {"counters": {"a": 2, "b": 1}, "gauges": {"g": 0}, "load_seconds": [2.0]}
    assert merge(first, second) == {
        "counters": {"a": 3, "b": 1},
        "gauges": {"g": 0, "h": 1},
        "load_seconds": [1.0, 2.0],
    }
    assert merge({}, {}) == {"counters": {}, "gauges": {}, "load_seconds": []}


def test_summary_is_flat() -> None:
    statistics = {"counters": {"a": 1}, "gauges": {"g": 2}, "load_seconds": [0.25, 0.5]}
    assert summarise(statistics) == {"a": 1, "g": 2, "loads": 2, "load_s_max": 0.5}
    assert summarise({}) == {"loads": 0}
