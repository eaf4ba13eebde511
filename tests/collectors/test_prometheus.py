"""Counters under one name whatever the vLLM version; absent is never zero."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from harness.analysis.numbers import counter_deltas
from harness.collectors.prometheus import METRICS, Page, samples_from_page, scrape
from harness.records import MetricSample

# Two generations of vLLM's page: 0.20 and what 0.32 adds.
PAGE_0_20 = """\
# TYPE vllm:kv_offload_total_bytes counter
vllm:kv_offload_total_bytes_total{engine="0",model_name="m",transfer_type="CPU_to_GPU"} 5.0e+06
vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} 10000
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 6000
"""
PAGE_0_32 = (
    PAGE_0_20
    + """\
vllm:kv_offload_load_bytes_total{engine="0",model_name="m"} 5.0e+06
vllm:kv_offload_allocation_failure_total{engine="0",model_name="m"} 0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="host"} 6000
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 6000
"""
)
TIER = """\
kvgate:tier_hit_tokens_total{engine="0",model_name="m",tier="host"} 100
kvgate:tier_hit_tokens_total{engine="0",model_name="m",tier="disk"} 200
kvgate:tier_store_backlog_blocks{engine="0",model_name="m"} 0
"""


def values(text: str) -> dict[str, float | None]:
    """Values by name or ``name/part`` of pages with one engine."""
    found = {}
    for sample in samples_from_page(text, mark="m", t_ns=1):
        part = sample.labels.get("tier") or sample.labels.get("source")
        found[f"{sample.name}/{part}" if part else sample.name] = sample.value
    return found


@pytest.mark.parametrize("page", [PAGE_0_20, PAGE_0_32], ids=["0.20", "0.32"])
def test_both_generations_give_the_same_hit_rate(page: str) -> None:
    found = values(page)
    hits, queries = found["external_hit_tokens"], found["external_query_tokens"]
    assert hits is not None
    assert queries is not None
    assert hits / queries == 0.6


def test_the_newer_page_tells_tokens_by_source() -> None:
    found = values(PAGE_0_32)
    assert found["cached_tokens_by_source/host"] == 6000
    assert found["prompt_tokens_by_source/external_kv_transfer"] == 6000


def test_a_series_that_is_not_there_is_a_sample_without_a_value() -> None:
    (sample,) = [
        s
        for s in samples_from_page(PAGE_0_20, mark="cold", t_ns=9)
        if s.name == "cached_tokens_by_source"
    ]
    assert sample == MetricSample(
        9, "cold", "prometheus", "cached_tokens_by_source", None, {}, "absent from /metrics"
    )


@pytest.mark.parametrize("line", PAGE_0_32.splitlines()[2:])
def test_removing_one_series_is_absent_and_never_zero(line: str) -> None:
    full, less = values(PAGE_0_32), values(PAGE_0_32.replace(line + "\n", ""))
    changed = {key for key in full.keys() | less.keys() if full.get(key) != less.get(key)}
    assert all(less.get(key) is None for key in changed)


def test_every_quantity_is_sampled_whatever_the_page_holds() -> None:
    names = {s.name for s in samples_from_page("", mark="m", t_ns=1)}
    assert names == {metric.name for metric in METRICS}
    assert all(s.value is None for s in samples_from_page("", mark="m", t_ns=1))


def test_engines_and_models_keep_their_identity() -> None:
    page = TIER + TIER.replace('engine="0"', 'engine="1"')
    samples = samples_from_page(page, mark="m", t_ns=1)
    assert [(s.labels, s.value) for s in samples if s.name == "tier_hit_tokens"] == [
        ({"engine": engine, "model_name": "m", "tier": tier}, value)
        for engine in "01"
        for tier, value in (("host", 100), ("disk", 200))
    ]


def test_labelled_parts_stay_apart() -> None:
    found = values(TIER)
    assert (found["tier_hit_tokens/host"], found["tier_hit_tokens/disk"]) == (100, 200)
    assert found["tier_store_backlog_blocks"] == 0


def test_the_names_of_the_table_are_unique() -> None:
    names = [metric.name for metric in METRICS]
    series = [name for metric in METRICS for name in metric.series]
    assert len(set(names)) == len(names)
    assert len(set(series)) == len(series)


def test_deltas_are_taken_between_marks_and_resets_are_told() -> None:
    def at(mark: str, text: str) -> list[MetricSample]:
        return samples_from_page(text, mark=mark, t_ns=1)

    before = at("cold", PAGE_0_20 + 'vllm:num_preemptions_total{engine="0"} 7\n')
    after = at(
        "end",
        PAGE_0_20.replace(" 6000", " 6500") + 'vllm:num_preemptions_total{engine="0"} 1\n',
    )
    counters = counter_deltas(before + after, "cold", "end")
    assert counters.get("external_hit_tokens") == 500
    assert counters.get("external_query_tokens") == 0
    assert counters.get("device_hit_tokens") is None
    assert counters.resets == ("preemptions of engine 0 went from 7 to 1",)
    assert counters.get("preemptions") is None


@pytest.mark.parametrize(
    "page",
    ["vllm:x{", 'vllm:x{engine="0" 1\n', "vllm:x one\n", "<html>not found</html>\n"],
)
def test_a_malformed_page_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Page(page)


# --- over HTTP --------------------------------------------------------------


@contextmanager
def page_server(body: bytes, status: int = 200) -> Iterator[str]:
    """Serves one page on a free port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_scrape_returns_samples_and_the_raw_page() -> None:
    with page_server(TIER.encode()) as url:
        samples, page = scrape(url, mark="cold")
    assert page == TIER
    assert {s.value for s in samples if s.name == "tier_hit_tokens"} == {100, 200}
    assert {s.mark for s in samples} == {"cold"}


def failures(samples: list[MetricSample]) -> set[str]:
    assert [s.name for s in samples] == [metric.name for metric in METRICS]
    assert all(s.value is None for s in samples)
    return {str(s.error) for s in samples}


def test_a_dead_port_gives_samples_that_say_so() -> None:
    with socket.socket() as probe:  # bound and not listening: nobody else can take it meanwhile
        probe.bind(("127.0.0.1", 0))
        samples, page = scrape(f"http://127.0.0.1:{probe.getsockname()[1]}", mark="cold")
    assert page == ""
    (error,) = failures(samples)
    assert error.startswith("scrape failed: ConnectError: ")


def test_an_error_page_is_a_failed_scrape() -> None:
    with page_server(TIER.encode(), status=500) as url:
        (error,) = failures(scrape(url, mark="cold")[0])
    assert error.startswith("scrape failed: HTTPStatusError: ")
    assert "500" in error


def test_a_malformed_page_is_a_failed_scrape() -> None:
    with page_server(b"vllm:x{") as url:
        (error,) = failures(scrape(url, mark="cold")[0])
    assert error.startswith("scrape failed: ")
