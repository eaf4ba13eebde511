"""Counters and gauges from a server's /metrics page, under one name whatever the vLLM version.

`Page` is the one reader of such a page. `METRICS` is the alias table; a metric that the page lacks
becomes a sample without a value, and so does a series whose value is no number. Samples keep all
labels of their series: engines are added up by whoever has looked for resets before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from harness.records import MetricSample


@dataclass(frozen=True)
class Metric:
    """One quantity: its series names, newest first.

    ``over_engines`` makes one value of a gauge of several engines; None: a counter, which is read
    as a difference between two marks and never as it stands.
    """

    name: str
    series: tuple[str, ...]
    over_engines: Callable[[Iterable[float]], float] | None = None

    @property
    def is_gauge(self) -> bool:
        """Its value may go down; it has no differences and no resets."""
        return self.over_engines is not None


METRICS: tuple[Metric, ...] = (
    Metric("device_query_tokens", ("vllm:prefix_cache_queries_total",)),
    Metric("device_hit_tokens", ("vllm:prefix_cache_hits_total",)),
    Metric("external_query_tokens", ("vllm:external_prefix_cache_queries_total",)),
    Metric("external_hit_tokens", ("vllm:external_prefix_cache_hits_total",)),
    Metric("prompt_tokens", ("vllm:prompt_tokens_total",)),
    Metric("generated_tokens", ("vllm:generation_tokens_total",)),
    Metric("prompt_tokens_by_source", ("vllm:prompt_tokens_by_source_total",)),
    Metric("cached_tokens_by_source", ("vllm:prompt_tokens_cached_by_source_total",)),
    Metric("preemptions", ("vllm:num_preemptions_total",)),
    Metric("tier_hit_tokens", ("kvgate:tier_hit_tokens_total",)),
    Metric("tier_read_bytes", ("kvgate:tier_read_bytes_total",)),
    Metric("tier_file_read_bytes", ("kvgate:tier_file_read_bytes_total",)),
    Metric("tier_write_bytes", ("kvgate:tier_write_bytes_total",)),
    Metric("tier_load_failed_blocks", ("kvgate:tier_load_failed_blocks_total",)),
    Metric("tier_verify_failed_blocks", ("kvgate:tier_verify_failed_blocks_total",)),
    Metric("tier_dropped_store_blocks", ("kvgate:tier_dropped_store_blocks_total",)),
    # Blocks and bytes of all engines together; a switch is on when it is on in every engine.
    Metric("tier_store_backlog_blocks", ("kvgate:tier_store_backlog_blocks",), math.fsum),
    Metric("tier_host_used_bytes", ("kvgate:tier_host_used_bytes",), math.fsum),
    Metric("tier_host_capacity_bytes", ("kvgate:tier_host_capacity_bytes",), math.fsum),
    Metric("tier_disk_enabled", ("kvgate:tier_disk_enabled",), min),
    Metric("tier_direct_io", ("kvgate:tier_direct_io",), min),
)


@dataclass(frozen=True)
class Reading:
    """One series of a page. ``value`` None: what stands there is no number; ``note`` says what."""

    labels: dict[str, str]
    value: float | None
    note: str | None = None


class Page:
    """An exposition page. Raises ValueError on malformed text.

    NaN and infinities are no values, nor is a series that stands there twice. A label without a
    text is no label, as in the format itself.
    """

    def __init__(self, text: str) -> None:
        self._series: dict[str, dict[tuple[tuple[str, str], ...], Reading]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._add(sample.name, sample.labels, sample.value)

    def _add(self, name: str, labels: dict[str, str], value: float) -> None:
        own = {label: text for label, text in sorted(labels.items()) if text}
        series = self._series.setdefault(name, {})
        key = tuple(own.items())
        if key in series:
            series[key] = Reading(own, None, "twice on /metrics")
        elif not math.isfinite(value):
            series[key] = Reading(own, None, f"{value} on /metrics")
        else:
            series[key] = Reading(own, value)

    def names(self) -> list[str]:
        """Names of all series."""
        return list(self._series)

    def readings(self, name: str) -> list[Reading]:
        """All series of a name, in the order of the page; empty when it is not there."""
        return list(self._series.get(name, {}).values())


def samples_from_page(text: str, *, mark: str, t_ns: int) -> list[MetricSample]:
    """One sample per series of each metric of the table. Raises ValueError on malformed text."""
    page = Page(text)
    samples = []
    for metric in METRICS:
        found = next((r for name in metric.series if (r := page.readings(name))), None)
        for reading in found or [Reading({}, None, "absent from /metrics")]:
            samples.append(
                MetricSample(
                    t_ns,
                    mark,
                    "prometheus",
                    metric.name,
                    reading.value,
                    reading.labels,
                    reading.note,
                )
            )
    return samples


def gauge_value(samples: Iterable[MetricSample], name: str) -> tuple[float | None, str | None]:
    """(value, why there is none) of a gauge over all engines, by the rule of the table.

    One engine that does not tell makes the whole unknown. Raises KeyError for a name that is no
    gauge.
    """
    rules = {metric.name: metric.over_engines for metric in METRICS if metric.over_engines}
    rule = rules[name]
    found = [sample for sample in samples if sample.name == name]
    values = [sample.value for sample in found if sample.value is not None]
    if not values or len(values) < len(found):
        return None, next((s.error for s in found if s.value is None), "absent from /metrics")
    return rule(values), None


def scrape(
    base_url: str, *, mark: str, get: Callable[[str], httpx.Response] | None = None
) -> tuple[list[MetricSample], str]:
    """(samples, raw page). A failed scrape yields samples without values, with the error.

    ``get``: asks for a path where an address alone does not do (key, TLS, deadline).
    """
    t_ns = time.monotonic_ns()
    try:
        if get is None:
            response = httpx.get(f"{base_url}/metrics", timeout=30.0, trust_env=False)
        else:
            response = get("/metrics")
        response.raise_for_status()
        return samples_from_page(response.text, mark=mark, t_ns=t_ns), response.text
    except (httpx.HTTPError, ValueError) as error:
        failed = f"scrape failed: {type(error).__name__}: {error}"[:300]
        return [
            MetricSample(t_ns, mark, "prometheus", m.name, None, error=failed) for m in METRICS
        ], ""
