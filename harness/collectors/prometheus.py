"""Counters and gauges from a server's /metrics page, under one name whatever the vLLM version.

`METRICS` is the alias table. A metric the page lacks becomes a sample without a value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from harness.records import MetricSample


@dataclass(frozen=True)
class Metric:
    """One quantity: its series names, newest first, and the label that tells its parts apart."""

    name: str
    series: tuple[str, ...]
    label: str | None = None


METRICS: tuple[Metric, ...] = (
    Metric("device_query_tokens", ("vllm:prefix_cache_queries_total",)),
    Metric("device_hit_tokens", ("vllm:prefix_cache_hits_total",)),
    Metric("external_query_tokens", ("vllm:external_prefix_cache_queries_total",)),
    Metric("external_hit_tokens", ("vllm:external_prefix_cache_hits_total",)),
    Metric("prompt_tokens", ("vllm:prompt_tokens_total",)),
    Metric("generated_tokens", ("vllm:generation_tokens_total",)),
    Metric("prompt_tokens_by_source", ("vllm:prompt_tokens_by_source_total",), "source"),
    Metric("cached_tokens_by_source", ("vllm:prompt_tokens_cached_by_source_total",), "source"),
    Metric("preemptions", ("vllm:num_preemptions_total",)),
    Metric("tier_hit_tokens", ("kvgate:tier_hit_tokens_total",), "tier"),
    Metric("tier_read_bytes", ("kvgate:tier_read_bytes_total",), "tier"),
    Metric("tier_file_read_bytes", ("kvgate:tier_file_read_bytes_total",)),
    Metric("tier_write_bytes", ("kvgate:tier_write_bytes_total",), "tier"),
    Metric("tier_store_backlog_blocks", ("kvgate:tier_store_backlog_blocks",)),
    Metric("tier_load_failed_blocks", ("kvgate:tier_load_failed_blocks_total",)),
    Metric("tier_verify_failed_blocks", ("kvgate:tier_verify_failed_blocks_total",)),
    Metric("tier_dropped_store_blocks", ("kvgate:tier_dropped_store_blocks_total",)),
    Metric("tier_host_used_bytes", ("kvgate:tier_host_used_bytes",)),
    Metric("tier_host_capacity_bytes", ("kvgate:tier_host_capacity_bytes",)),
    Metric("tier_disk_enabled", ("kvgate:tier_disk_enabled",)),
    Metric("tier_direct_io", ("kvgate:tier_direct_io",)),
)


def parse_families(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """(series name, labels, value) of an exposition page. Raises ValueError on malformed text."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def samples_from_page(text: str, *, mark: str, t_ns: int) -> list[MetricSample]:
    """One sample per metric of the table (per part where it has a label); engines are added up."""
    series: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, labels, value in parse_families(text):
        series.setdefault(name, []).append((labels, value))
    samples = []
    for metric in METRICS:
        found = next((name for name in metric.series if name in series), None)
        if found is None:
            samples.append(
                MetricSample(
                    t_ns, mark, "prometheus", metric.name, None, error="absent from /metrics"
                )
            )
            continue
        parts: dict[str, float] = {}
        for labels, value in series[found]:
            part = labels.get(metric.label, "") if metric.label else ""
            parts[part] = parts.get(part, 0.0) + value
        for part, value in sorted(parts.items()):
            own = {metric.label: part} if metric.label else {}
            samples.append(MetricSample(t_ns, mark, "prometheus", metric.name, value, own))
    return samples


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
