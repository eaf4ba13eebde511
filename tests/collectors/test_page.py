"""A value that is no number is no value; identity stays until resets were looked for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis.counters import GAUGES, Counters, counter_deltas
from harness.collectors.process import SIMULATED_READS, with_simulated_reads
from harness.collectors.prometheus import METRICS, Page, gauge_value, samples_from_page
from harness.records import MetricSample, canonical_json

HITS = "vllm:prefix_cache_hits_total"
TIER = "kvgate:tier_hit_tokens_total"


def line(series: str, value: float | str, **labels: str) -> str:
    shown = ",".join(f'{name}="{text}"' for name, text in labels.items())
    return f"{series}{{{shown}}} {value}\n"


def engines(series: str, *values: float | str) -> str:
    """One series of each engine, numbered from 0."""
    return "".join(line(series, v, engine=str(i), model_name="m") for i, v in enumerate(values))


def grown(before: str, after: str) -> Counters:
    samples = samples_from_page(before, mark="cold", t_ns=1)
    return counter_deltas([*samples, *samples_from_page(after, mark="end", t_ns=2)], "cold", "end")


# --- absent is not a value ----------------------------------------------------


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e400"])
def test_what_is_no_number_is_absent_with_a_note_and_can_be_sealed(value: str) -> None:
    samples = samples_from_page(engines(HITS, 5, value), mark="cold", t_ns=1)
    found = {s.labels.get("engine"): s for s in samples if s.name == "device_hit_tokens"}
    assert found["0"].value == 5
    assert found["1"].value is None
    assert "on /metrics" in str(found["1"].error)
    canonical_json(samples)  # raises on NaN
    assert grown(engines(HITS, 5, value), engines(HITS, 9, 9)).get("device_hit_tokens") is None
    assert grown(engines(HITS, 5, 5), engines(HITS, 9, value)).get("device_hit_tokens") is None


def test_a_series_that_stands_there_twice_has_no_value() -> None:
    page = engines(HITS, 5) + engines(HITS, 5)
    (sample,) = [
        s for s in samples_from_page(page, mark="m", t_ns=1) if s.name.startswith("device_hit")
    ]
    assert (sample.value, sample.error) == (None, "twice on /metrics")


def test_an_empty_label_is_no_label() -> None:
    (reading,) = Page(line(HITS, 5, engine="0", model_name="")).readings(HITS)
    assert reading.labels == {"engine": "0"}
    page = line(HITS, 5, engine="0", model_name="") + line(HITS, 7, engine="0")
    assert [r.value for r in Page(page).readings(HITS)] == [None]


def test_a_counter_below_zero_grows_by_nothing_known() -> None:
    counters = grown(engines(HITS, -1), engines(HITS, 7))
    assert counters.get("device_hit_tokens") is None
    assert counters.total("device_hit_tokens") is None
    assert grown(engines(HITS, 7), engines(HITS, -1)).at_least == {"device_hit_tokens": 0}


def test_one_unknown_part_makes_the_total_unknown() -> None:
    before = line(TIER, 0, tier="host", engine="0") + line(TIER, 0, tier="disk", engine="0")
    after = line(TIER, "NaN", tier="host", engine="0") + line(TIER, 64, tier="disk", engine="0")
    counters = grown(before, after)
    assert counters.get("tier_hit_tokens/disk") == 64
    assert counters.get("tier_hit_tokens/host") is None
    assert counters.total("tier_hit_tokens") is None


@pytest.mark.parametrize("reads", ["NaN", None])
def test_simulated_reads_that_are_no_number_are_absent(reads: str | None) -> None:
    page = "" if reads is None else f"{SIMULATED_READS} {reads}\n"
    sample = MetricSample(1, "m", "process", "disk_read_bytes", 7.0, {"pid": "1"})
    (found,) = with_simulated_reads([sample], page)
    assert found.value is None
    assert found.error is not None


@given(st.text(alphabet='vllm:{}="#\\ \n1.e+NaIf,TYPEcounter', max_size=80))
def test_any_text_is_a_page_or_a_value_error(text: str) -> None:
    try:
        page = Page(text)
    except ValueError:
        return
    for name in page.names():
        for reading in page.readings(name):
            assert reading.value is None or math.isfinite(reading.value)


# --- one engine at a time -----------------------------------------------------


def test_an_engine_that_began_anew_is_not_hidden_by_another() -> None:
    counters = grown(engines(HITS, 100, 100), engines(HITS, 5, 300))
    assert counters.get("device_hit_tokens") is None
    assert counters.resets == ("device_hit_tokens of engine 0 (model_name m) went from 100 to 5",)
    assert counters.at_least == {"device_hit_tokens": 205}
    assert not counters.whole_reset


def test_a_whole_server_that_began_anew_is_told_from_one_engine() -> None:
    assert grown(engines(HITS, 100, 100), engines(HITS, 5, 30)).whole_reset
    assert grown(engines(HITS, 100), engines(HITS, 5)).whole_reset


def test_an_engine_that_went_is_told_and_its_counter_unknown() -> None:
    counters = grown(engines(HITS, 100, 100), engines(HITS, 300))
    assert counters.vanished == ("engine 1 (model_name m)",)
    assert counters.get("device_hit_tokens") is None
    assert counters.resets == ()


def test_a_new_engine_does_not_bring_its_past() -> None:
    counters = grown(engines(HITS, 100), engines(HITS, 110, 5000))
    assert counters.appeared == ("engine 1 (model_name m)",)
    assert counters.get("device_hit_tokens") is None


@pytest.mark.parametrize("label", ["instance", "model_name"])
def test_engines_of_several_servers_stay_apart(label: str) -> None:
    def page(first: int, second: int) -> str:
        return "".join(
            line(HITS, value, engine="0", **{label: name})
            for name, value in (("a", first), ("b", second))
        )

    counters = grown(page(100, 100), page(5, 300))
    assert counters.resets == (f"device_hit_tokens of engine 0 ({label} a) went from 100 to 5",)
    assert grown(page(100, 100), page(150, 300)).get("device_hit_tokens") == 250


def test_a_reset_of_one_part_is_not_hidden_by_another() -> None:
    """Series that differ in another label are parts as well, such as the reasons of failures."""
    series = "kvgate:tier_load_failed_blocks_total"

    def page(damaged: int, gone: int) -> str:
        return line(series, damaged, engine="0", reason="damaged") + line(
            series, gone, engine="0", reason="gone"
        )

    counters = grown(page(10, 0), page(0, 10))
    assert counters.get("tier_load_failed_blocks") is None
    assert counters.resets == ("tier_load_failed_blocks/damaged of engine 0 went from 10 to 0",)
    assert grown(page(1, 2), page(2, 4)).get("tier_load_failed_blocks") == 3


def test_a_part_first_counted_amid_a_trial_began_at_zero() -> None:
    series = "kvgate:tier_load_failed_blocks_total"
    before = line(series, 0, engine="0", reason="gone")
    counters = grown(before, before + line(series, 3, engine="0", reason="damaged"))
    assert counters.get("tier_load_failed_blocks") == 3


def test_a_metric_that_came_amid_a_trial_is_unknown() -> None:
    assert (
        grown(engines(HITS, 1), engines(HITS, 1) + engines(TIER, 50)).total("tier_hit_tokens")
        is None
    )
    assert grown("", TIER + '{tier="disk"} 50\n').total("tier_hit_tokens") is None


def test_a_page_that_was_not_read_says_nothing_of_engines() -> None:
    counters = grown(engines(HITS, 1, 2), "")
    assert (counters.vanished, counters.appeared, counters.deltas) == ((), (), {})


def test_evidence_without_identity_is_one_engine() -> None:
    def sample(mark: str, value: float, **labels: str) -> MetricSample:
        return MetricSample(1, mark, "prometheus", "tier_hit_tokens", value, labels)

    samples = [sample("a", 1, tier="disk"), sample("b", 9, tier="disk")]
    counters = counter_deltas(samples, "a", "b")
    assert counters == Counters({"tier_hit_tokens/disk": 8.0})


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=5),
)
def test_growth_is_the_sum_or_unknown_with_a_reason(pairs: list[tuple[int, int]]) -> None:
    counters = grown(*(engines(HITS, *values) for values in zip(*pairs, strict=True)))
    fallen = [i for i, (before, after) in enumerate(pairs) if after < before]
    assert len(counters.resets) == len(fallen)
    if fallen:
        assert counters.get("device_hit_tokens") is None
        least = sum(b - a if b >= a else b for a, b in pairs)
        assert counters.at_least["device_hit_tokens"] == least
    else:
        assert counters.get("device_hit_tokens") == sum(b - a for a, b in pairs)


# --- gauges -------------------------------------------------------------------


def test_gauges_have_no_growth_and_no_reset() -> None:
    counters = grown(engines("kvgate:tier_disk_enabled", 1), engines("kvgate:tier_disk_enabled", 0))
    assert (counters.deltas, counters.resets) == ({}, ())
    assert {metric.name for metric in METRICS if metric.is_gauge} == GAUGES


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("tier_store_backlog_blocks", (3, 4), 7),
        ("tier_host_capacity_bytes", (100, 50), 150),
        ("tier_disk_enabled", (1, 0), 0),
        ("tier_direct_io", (1, 1), 1),
        ("tier_store_backlog_blocks", (0, "NaN"), None),
    ],
)
def test_a_gauge_of_several_engines_has_its_own_rule(
    name: str, values: tuple[float | str, ...], expected: float | None
) -> None:
    samples = samples_from_page(engines(f"kvgate:{name}", *values), mark="m", t_ns=1)
    value, why = gauge_value(samples, name)
    assert value == expected
    assert (why is None) == (expected is not None)
