"""Estimators against answers worked by hand."""

from __future__ import annotations

import math

import pytest

from harness.stats import (
    MIN_UNITS,
    mean,
    paired_effect,
    percentile,
    round9,
    t_quantile,
    wave_statistic,
)

ONE_TO_SIXTEEN = [float(i) for i in range(16, 0, -1)]


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        pytest.param(ONE_TO_SIXTEEN, 0.5, 8, id="rank 8 of 16 exactly"),
        pytest.param(ONE_TO_SIXTEEN, 0.9, 15, id="14.4 rounds up to 15"),
        pytest.param(ONE_TO_SIXTEEN, 0.95, 16, id="15.2 rounds up to 16"),
        pytest.param(ONE_TO_SIXTEEN, 0.99, 16, id="15.84 rounds up to 16"),
        pytest.param([3.0], 0.5, 3, id="one value is every percentile"),
        pytest.param([3.0], 0.99, 3, id="one value, high q"),
        pytest.param([1, 2, 2, 2, 9], 0.5, 2, id="ties"),
        pytest.param(list(range(1, 61)), 0.95, 57, id="0.95 x 60 is 57, not 57.00000001"),
        pytest.param(list(range(1, 101)), 0.29, 29, id="0.29 x 100 is 29, not 28.99999999"),
        pytest.param([1.0, math.inf], 0.5, 1, id="a failed request stays at the end"),
        pytest.param([1.0, math.inf], 0.51, math.inf, id="and is never dropped"),
        pytest.param([1, 2, 3], 1.0, 3, id="q = 1 is the maximum"),
    ],
)
def test_percentile_is_the_nearest_rank(values: list[float], q: float, expected: float) -> None:
    assert percentile(values, q) == expected


def test_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


@pytest.mark.parametrize("q", [0.0, -0.1, 1.1, 50.0])
def test_percentile_outside_its_range_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match="q must be in"):
        percentile([1.0], q)


def test_mean_adds_exactly() -> None:
    assert mean([0.1] * 10) == 0.1


def test_mean_with_a_failed_request_is_infinite() -> None:
    assert mean([1.0, math.inf, 2.0]) == math.inf


def test_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        mean([])


def test_five_requests_use_the_mean_and_six_the_median() -> None:
    assert wave_statistic([1, 1, 1, 1, 6]) == (2.0, "mean")
    assert wave_statistic([1, 2, 3, 4, 5, 60]) == (3, "p50")


def test_a_wave_of_six_survives_three_failures_and_not_four() -> None:
    assert wave_statistic([1, 2, 3] + [math.inf] * 3) == (3, "p50")
    assert wave_statistic([1, 2] + [math.inf] * 4) == (math.inf, "p50")


def test_minimum_units_are_the_smallest_with_95_percent_confidence() -> None:
    for q, n in MIN_UNITS.items():
        if q != 0.5:  # the median's six are the two-sided bound 2 x 0.5**6 <= 0.05
            assert 1 - q**n >= 0.95
            assert 1 - q ** (n - 1) < 0.95
    assert 2 * 0.5 ** MIN_UNITS[0.5] <= 0.05 < 2 * 0.5 ** (MIN_UNITS[0.5] - 1)


def test_paired_effect_of_three_repetitions() -> None:
    # Ratios 0.1, 0.2, 0.4: the geometric mean is 0.2, the logs lie ln 2 apart, so their standard
    # deviation is ln 2 and the interval is 0.2 x exp(+-4.302652729749 x ln 2 / sqrt 3).
    effect = paired_effect([1, 2, 4], [10, 10, 10])
    half = 4.302652729749 * math.log(2) / math.sqrt(3)
    assert effect.ratios == (0.1, 0.2, 0.4)
    assert effect.ratio == pytest.approx(0.2, rel=1e-12)
    assert effect.low == pytest.approx(0.2 * math.exp(-half), rel=1e-9)
    assert effect.high == pytest.approx(0.2 * math.exp(half), rel=1e-9)
    assert effect.confidence == 0.95


def test_paired_effect_pairs_by_repetition() -> None:
    # Both arms drift by a factor of two, their ratio does not: no width at all.
    effect = paired_effect([1, 2, 4], [2, 4, 8])
    assert (effect.ratio, effect.low, effect.high) == pytest.approx((0.5, 0.5, 0.5))


def test_one_repetition_has_no_interval() -> None:
    effect = paired_effect([1], [4])
    assert effect.ratio == pytest.approx(0.25)
    assert (effect.low, effect.high) == (None, None)


def test_an_infinite_candidate_is_an_infinite_ratio() -> None:
    effect = paired_effect([1, math.inf, 1], [2, 2, 2])
    assert effect.ratio == math.inf
    assert effect.ratios == (0.5, math.inf, 0.5)
    assert (effect.low, effect.high) == (None, None)


@pytest.mark.parametrize(
    ("candidate", "baseline", "reason"),
    [
        pytest.param([1, 1], [1, math.inf], "not a positive finite", id="infinite baseline"),
        pytest.param([1, 1], [1, 0], "not a positive finite", id="zero baseline"),
        pytest.param([0, 1], [1, 1], "not positive", id="zero candidate"),
        pytest.param([1], [1, 1], "1 candidate and 2 baseline", id="unequal lengths"),
        pytest.param([], [], "0 candidate and 0 baseline", id="no repetition"),
    ],
)
def test_an_effect_that_says_nothing_is_refused(
    candidate: list[float], baseline: list[float], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        paired_effect(candidate, baseline)


@pytest.mark.parametrize(
    ("p", "degrees", "table"),
    [
        (0.975, 1, 12.7062047364),
        (0.975, 2, 4.30265272975),
        (0.975, 5, 2.57058183564),
        (0.975, 30, 2.04227245630),
        (0.995, 1, 63.6567411629),
        (0.995, 2, 9.92484320092),
        (0.995, 5, 4.03214298356),
        (0.995, 30, 2.74999565357),
    ],
)
def test_t_quantile_agrees_with_the_table(p: float, degrees: int, table: float) -> None:
    assert t_quantile(p, degrees) == pytest.approx(table, rel=1e-9)


def test_t_quantile_of_one_half_is_zero() -> None:
    assert t_quantile(0.5, 3) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("p", "degrees"), [(0.4, 2), (1.0, 2), (0.975, 0)])
def test_t_quantile_outside_its_range_is_refused(p: float, degrees: int) -> None:
    with pytest.raises(ValueError, match="t_quantile"):
        t_quantile(p, degrees)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.1 + 0.2, 0.3),
        (123456789.123, 123456789.0),
        (1.23456789012e-7, 1.23456789e-7),
        (0.0, 0.0),
        (math.inf, math.inf),
        (-math.inf, -math.inf),
    ],
)
def test_round9_keeps_nine_digits(value: float, expected: float) -> None:
    assert round9(value) == expected
